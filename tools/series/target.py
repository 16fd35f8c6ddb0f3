# SPDX-License-Identifier: Apache-2.0
"""A release to move the series to, and the pin of it."""

import re
import tarfile
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import tomlkit
from packaging.version import InvalidVersion, Version

from tools.common.cli import ToolError
from tools.common.pin import UNKNOWN, PinnedFile, Project
from tools.source.fetch import fetch
from tools.source.index import Index, like_wheel, releases, version_of

_FILE = ("filename", "size", "sha256")


class Target(NamedTuple):
    """``upstream.toml`` on what to move to, but for the id of its tree."""

    pin: Any  # a document of tomlkit: comments and other keys stay
    source: PinnedFile

    def render(self, tree: str) -> str:
        self.pin["release"]["tree"] = tree
        return tomlkit.dumps(self.pin)


def find_target(project: Project, onto: str, commit: str | None) -> Target:
    """Find a version on the package index, and get its source; its commit may be known."""
    if commit and not re.fullmatch(r"[0-9a-f]{40}", commit):
        what, step = "give the whole id of the commit", "git ls-remote <upstream> shows it"
        raise ToolError(what, "--commit", "40 hexadecimal digits", commit, step)
    try:
        version = Version(onto)
    except InvalidVersion:
        what, expected = "this is not a version of vLLM", "a version such as 1.2.3"
        raise ToolError(what, "--onto", expected, onto) from None
    old, index = project.pin, Index()
    files = index.files(old.source.distribution)
    archives = (file for file in files if file.link.filename.endswith(".tar.gz"))
    found = next((file for file in archives if version_of(file) == version), None)
    if found is None:
        what = "the package index has no source archive of this version"
        newest = f"a release; the newest are {', '.join(map(str, releases(files)[-5:]))}"
        raise ToolError(what, old.source.distribution, newest, version, "check the version")
    if found.link.is_yanked:
        print(f"note: {found.link.filename} is withdrawn on the package index")
    source = index.pin(found)
    stated = _stated_commit(fetch(source, project))
    if commit and not commit.startswith(stated):
        what, said = "the source archive was made from another commit", f"{stated}... in it"
        raise ToolError(what, source.filename, commit, said, "check the commit of the tag")
    pin: Any = tomlkit.parse(project.pin_file.read_text(encoding="utf-8"))
    release = {"version": source.version, "tag": f"v{version}"}
    pin["release"].update(release | {"commit": commit or stated or UNKNOWN})
    pin["source"].update({key: getattr(source, key) for key in _FILE})
    for variant, table in pin.get("wheel", {}).items():
        files = [f for f in index.files(str(table["distribution"])) if version_of(f) == version]
        table.pop("version", None)
        if like := like_wheel(files, str(table["tag"])):
            file = index.pin(like)
        elif variant in old.wheels and old.wheels[variant].tests_only:
            file = old.wheels[variant].file  # lends its kernels to any release
            table["version"] = file.version
        else:
            print(f"note: there is no base wheel {variant} of vLLM {version}")
            for key in _FILE:
                table.pop(key, None)
            continue
        tag = "-".join(file.filename.removesuffix(".whl").split("-")[-3:])
        table.update({key: getattr(file, key) for key in _FILE} | {"tag": tag})
    return Target(pin, source)


def _stated_commit(archive: Path) -> str:
    """The beginning of the commit's id, if the archive's version module states it."""
    with tarfile.open(archive) as tar:
        modules = (m for m in tar if PurePosixPath(m.name).parts[1:] == ("vllm", "_version.py"))
        module = next(modules, None)
        file = tar.extractfile(module) if module else None
        text = file.read().decode(errors="replace") if file else ""
    match = re.search(r"^__commit_id__ = .*'g?([0-9a-f]{7,40})'", text, re.MULTILINE)
    return match[1] if match else ""
