# SPDX-License-Identifier: Apache-2.0
"""A release or a commit to move the series to, and the pin of it."""

import hashlib
import re
import tarfile
from collections.abc import Iterable
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import tomlkit
from packaging.version import InvalidVersion, Version
from unearth import Package

from tools.common.cli import ToolError
from tools.common.files import staging, write
from tools.common.git import Git
from tools.common.pin import UNKNOWN, PinnedFile, Project
from tools.source.fetch import fetch
from tools.source.index import Index, like_wheel, releases, version_of

# What building a source archive adds to the tagged files.
ARCHIVE_ONLY = ["PKG-INFO", "setup.cfg", "vllm.egg-info", "vllm/_version.py"]
_FILE = ("filename", "size", "sha256")
Wheels = dict[str, PinnedFile]


class Target(NamedTuple):
    """``upstream.toml`` on what to move to, but for the id of its tree."""

    pin: Any  # a document of tomlkit: comments and other keys stay
    source: PinnedFile
    notes: list[str]  # that a person should read

    def render(self, tree: str) -> str:
        self.pin["release"]["tree"] = tree
        return tomlkit.dumps(self.pin)


def find_target(project: Project, onto: str, clone: Path | None, commit: str | None) -> Target:
    """Find a version on the package index, or a git ref in a clone, and get its source.

    A ref that is a release's tag gives the release. The source of any other commit is packed from
    the clone: no index has it.
    """
    if clone is None:
        if commit and not re.fullmatch(r"[0-9a-f]{40}", commit):
            what, step = "a commit is named by its whole id", "git ls-remote <upstream> has it"
            raise ToolError(what, "--commit", "40 hexadecimal digits", commit, step)
        return _release(project, _version(onto), commit)
    git = open_clone(clone)
    found = resolve(git, onto)
    tag, distance = _describe(git, found)
    offered = Index().files(project.pin.source.distribution) if distance == 0 else []
    if _source(offered, Version(tag)):
        return _release(project, Version(tag), found)
    return _packed(project, git, found, tag, distance)


def open_clone(path: Path) -> Git:
    """The repository at ``path``, which must be the top directory of a clone."""
    if not (path / ".git").exists():
        what, step = "this is not a clone of vLLM", "name the top directory of one: --clone <path>"
        raise ToolError(what, path, "a directory with .git", next_step=step)
    return Git(path)


def resolve(git: Git, ref: str) -> str:
    """The commit that a ref of the clone names; ``1.2.3`` may name the tag ``v1.2.3``."""
    found = None if ref.startswith("-") else git.commit_id(ref) or git.commit_id(f"v{ref}")
    if found is None:
        step = f"fetch it: git -C {git.path} fetch --tags origin"
        what, expected = "the clone has no such ref", "a tag, a branch or a commit"
        raise ToolError(what, git.path, expected, ref, step)
    return found


def _version(onto: str) -> Version:
    try:
        return Version(onto)
    except InvalidVersion:
        what, expected = "this is not a version of vLLM", "a version such as 1.2.3"
        step = "for a git ref, name the clone: --clone <path>"
        raise ToolError(what, "--onto", expected, onto, step) from None


def _describe(git: Git, commit: str) -> tuple[str, int]:
    """The newest release tag that the commit holds, and the number of commits since."""
    said = git.text("describe", "--tags", "--long", "--match", "v[0-9]*", commit)
    tag, distance, _ = said.rsplit("-", 2)
    return tag, int(distance)


def _source(files: Iterable[Package], version: Version) -> Package | None:
    archives = (file for file in files if file.link.filename.endswith(".tar.gz"))
    return next((file for file in archives if version_of(file) == version), None)


def _pin(
    project: Project, tag: str, commit: str, source: PinnedFile, only: list[str], wheels: Wheels
) -> Any:
    """The pin on another source and its base wheels; a variant may have none."""
    pin: Any = tomlkit.parse(project.pin_file.read_text(encoding="utf-8"))
    pin["release"].update({"version": source.version, "tag": tag, "commit": commit})
    pin["source"].update({key: getattr(source, key) for key in _FILE})
    if list(pin["source"]["archive_only"]) != only:
        pin["source"]["archive_only"] = only
    for variant, table in pin.get("wheel", {}).items():
        table.pop("version", None)
        if file := wheels.get(variant):
            tag = "-".join(file.filename.removesuffix(".whl").split("-")[-3:])
            other = {"version": file.version} if file.version != source.version else {}
            table.update({key: getattr(file, key) for key in _FILE} | {"tag": tag} | other)
        else:
            for key in _FILE:
                table.pop(key, None)
    return pin


def _release(project: Project, version: Version, commit: str | None) -> Target:
    old, index = project.pin, Index()
    files = index.files(old.source.distribution)
    found = _source(files, version)
    if found is None:
        what = "the package index has no source archive of this version"
        newest = f"a release; the newest are {', '.join(map(str, releases(files)[-5:]))}"
        step = "check the version, or name a ref of a clone: --onto <ref> --clone <path>"
        raise ToolError(what, old.source.distribution, newest, version, step)
    notes = []
    if found.link.is_yanked:
        notes.append(f"{found.link.filename} is withdrawn on the package index")
    source = index.pin(found)
    stated = _stated_commit(fetch(source, project))
    if commit and stated and not commit.startswith(stated):
        what, said = "the source archive was made from another commit", f"{stated}... in it"
        raise ToolError(what, source.filename, commit, said, "check the commit of the tag")
    if commit is None:
        said = f"the archive names its commit only as {stated or 'nothing'}: the pin says "
        notes.append(f"{said}commit = {UNKNOWN!r}; name it with --commit or --clone")
    wheels: Wheels = {}
    for variant, table in tomlkit.parse(project.pin_file.read_text()).get("wheel", {}).items():
        files = [f for f in index.files(str(table["distribution"])) if version_of(f) == version]
        if like := like_wheel(files, str(table["tag"])):
            wheels[variant] = index.pin(like)
        elif variant in old.wheels and old.wheels[variant].tests_only:
            wheels[variant] = old.wheels[variant].file  # lends its kernels to any release
    only = list(old.archive_only) or ARCHIVE_ONLY
    pin = _pin(project, f"v{version}", commit or UNKNOWN, source, only, wheels)
    return Target(pin, source, notes)


def _stated_commit(archive: Path) -> str | None:
    """The beginning of the commit's id, as the archive's version module states it."""
    with tarfile.open(archive) as tar:
        modules = (m for m in tar if PurePosixPath(m.name).parts[1:] == ("vllm", "_version.py"))
        module = next(modules, None)
        file = tar.extractfile(module) if module else None
        text = file.read().decode(errors="replace") if file else ""
    match = re.search(r"^__commit_id__ = .*'g?([0-9a-f]{7,40})'", text, re.MULTILINE)
    return match[1] if match else None


def _packed(project: Project, git: Git, commit: str, tag: str, distance: int) -> Target:
    """A target without a release: its source is an archive made here, the same on every machine."""
    last = Version(tag)
    version, label, short = str(last), tag, commit[:12]
    if distance:
        after = last.release if last.is_prerelease else (*last.release[:-1], last.release[-1] + 1)
        version = ".".join(map(str, after)) + f".dev{distance}"
        label = f"{tag}-{distance}-g{short}"
    name = f"vllm-{version}-{short}.tar.gz"
    with staging(project.downloads / "pack") as place:
        # Every file, whatever the commit's attributes leave out.
        pack = Git(place)
        pack.init("pack")
        pack.fetch(git.path, "--depth=1", commit)
        (place / ".git/info").mkdir(exist_ok=True)
        (place / ".git/info/attributes").write_text("* -export-ignore -export-subst\n")
        words = ("--format=tar.gz", f"--prefix=vllm-{version}/")
        data = pack.run("archive", *words, commit).stdout
    write(project.downloads / name, data)
    digest = hashlib.sha256(data).hexdigest()
    source = PinnedFile(project.pin.source.distribution, version, name, len(data), digest)
    note = (
        f"{short} is no release: {name} was packed from the clone, no index has it. On another "
        "machine, copy it to build/downloads/."
    )
    return Target(_pin(project, label, commit, source, [], {}), source, [note])
