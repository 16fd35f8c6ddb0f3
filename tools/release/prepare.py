# SPDX-License-Identifier: Apache-2.0
"""The next release, as an edit that a person commits. Nothing here commits, tags or pushes."""

import argparse
import re
import tomllib
from typing import Any

import tomlkit

from tools.common.cli import add_downloads
from tools.common.errors import ToolError
from tools.common.files import replace_all
from tools.common.git import Git
from tools.common.pin import Project
from tools.series.check import check_series
from tools.series.export import export_series
from tools.series.patch import Patch
from tools.series.series import Series, parse_series
from tools.wheel.plan import tree_series

declare = add_downloads


def run(arguments: argparse.Namespace, project: Project) -> None:
    """Write number and changelog of the next release, both or neither. The changelog gets the
    patches that changed since the last tag re.<n>, and the date of the last commit; read it, edit
    it, commit it. Refuses uncommitted changes, a stale series and a release without changes."""
    git, number = open_repository(project), project.release
    last = max(read_tags(git), default=None)
    if last is not None:
        if number not in (last, last + 1):
            what, where = "the release number does not follow the last", "pyproject.toml, [project]"
            raise ToolError(what, f"{where}.version", f'"{last}" or "{last + 1}"', f'"{number}"')
        number = last + 1
    refuse_stale(project)
    _, series = tree_series(project)
    tag = f"re.{last}" if last is not None else None
    changes, old_version = changes_since(project, series, tag)
    moved = old_version not in (None, project.pin.version)
    if not changes and not moved:
        found = f"the series of {tag}" if tag else "no patches"
        raise ToolError("there is nothing to release", found=found)
    date = git.text("log", "-1", "--date=format-local:%Y-%m-%d", "--format=%cd")  # in UTC
    changelog, settings = project.root / "CHANGELOG.md", project.root / "pyproject.toml"
    if not changelog.is_file():
        raise ToolError("there is no changelog", where=changelog)
    base = f"On vLLM {project.pin.version}" + (f", before on {old_version}." if moved else ".")
    lines = [f"### Patches of {project.line}", "", base]
    lines += ["", *(f"- {change}" for change in changes)] if changes else []
    document: Any = tomlkit.parse(settings.read_text(encoding="utf-8"))
    document["project"]["version"] = str(number)
    text, patches = changelog.read_text(encoding="utf-8"), "\n".join(lines) + "\n"
    texts = {
        changelog: date_section(text, number, date, patches).encode(),
        settings: tomlkit.dumps(document).encode(),
    }
    replace_all(texts)
    print(f"prepared: re.{number}, {f'since {tag}' if tag else 'the first release'}")
    for change in changes:
        print(f"  {change}")
    print("next: read CHANGELOG.md, edit what it says, commit; then: make release")


# A release's section: its number, its state or date, and its text up to the next.
_SECTION = re.compile(r"^## re\.(\d+), (unreleased|[\d-]{10})$.*?(?=^## re\.|\Z)", re.M | re.S)


def open_repository(project: Project) -> Git:
    """The project's own repository, with nothing that is not committed."""
    git = Git(project.root)
    if not (project.root / ".git").exists() or git.commit_id("HEAD") is None:
        what, expected = "a release is made from a commit", "a git repository with a commit"
        raise ToolError(what, where=project.root, expected=expected)
    git.refuse_dirt("the repository has changes that are not committed")
    return git


def read_tags(git: Git) -> dict[int, str]:
    """Commits of the releases made so far, by number."""
    names = git.text("tag", "--list", "re.*").split()
    found = {int(name[3:]): git.commit_id(name) for name in names if re.fullmatch(r"re\.\d+", name)}
    return {number: commit for number, commit in found.items() if commit is not None}


def refuse_stale(project: Project) -> None:
    check_series(project)
    if stale := export_series(project, check=True):
        what = "the build tree has what the series has not"
        step = "python -m tools series export, and commit; or series apply"
        raise ToolError(what, where=project.tree, next_step=step, details=stale)


def changes_since(
    project: Project, series: Series, tag: str | None
) -> tuple[list[str], str | None]:
    """What changed in the series since a release, if there was one, and the vLLM of that.

    A patch that only moved, because of those before it, is not changed. Those removed come last.
    """

    def then(name: str) -> bytes:
        path = f"patches/{project.line}/{name}"
        return Git(project.root).read(tag, path) or b"" if tag else b""

    pin = tomllib.loads(then("upstream.toml").decode())
    old = {name: Patch(name, then(name)) for name in parse_series(then("series").decode())}
    kept = {patch.name for patch in series}
    elsewhere = {patch.subject: patch for patch in old.values() if patch.name not in kept}
    changes = []
    for patch in series:
        before = old.get(patch.name) or elsewhere.pop(patch.subject, None)
        if before is None:
            changes.append(("added", patch))
        elif _content(patch) != _content(before):
            changes.append(("changed", patch))
        elif patch.name != before.name:
            changes.append(("renamed", patch))
    changes += [("removed", patch) for patch in elsewhere.values()]
    said = [f"{kind} `{patch.name}`: {patch.subject}" for kind, patch in changes]
    return said, pin["release"]["version"] if pin else None


def _content(patch: Patch) -> tuple[str, str, bytes]:
    """A patch without its place in the files: no line numbers, no ids."""
    place = re.compile(rb"^(index .*|@@ -\S+ \+\S+ @@.*)$", re.MULTILINE)
    return patch.subject, patch.body, place.sub(b"", patch.diff_bytes)


def section(text: str, number: int) -> tuple[str, str] | None:
    """State (``unreleased`` or a date) and text of a release's section, heading included."""
    found = (s for s in _SECTION.finditer(text) if int(s[1]) == number)
    return next(((s[2], s[0].rstrip() + "\n") for s in found), None)


def date_section(text: str, number: int, date: str, patches: str) -> str:
    """The changelog with the section of ``number`` dated and its patches listed.

    A section that is not there is put before the first one. One that is dated already may get the
    patches of another line.
    """
    found = section(text, number)
    heading = f"## re.{number}, {date}"
    if found is None:
        first = _SECTION.search(text)
        at = first.start() if first else len(text)
        rest = f"\n{text[at:]}" if text[at:] else ""
        return text[:at].rstrip("\n") + f"\n\n{heading}\n\n{patches}{rest}"
    state, old = found
    if state != "unreleased" and patches.splitlines()[0] in old.splitlines():
        what, where = "this release is prepared already", f"CHANGELOG.md, re.{number}"
        raise ToolError(what, where, "unreleased", state, "commit it, then: make release")
    new = old.replace(f"## re.{number}, unreleased", heading, 1) + f"\n{patches}"
    return text.replace(old, new, 1)
