# SPDX-License-Identifier: Apache-2.0
"""Which patches changed since a release, and the section of the changelog that says so."""

from __future__ import annotations

import io
import re
import tarfile
import tempfile
from dataclasses import dataclass
from pathlib import Path

from tools.common.errors import ToolError
from tools.common.git import Git
from tools.common.pin import Project
from tools.series.apply import am_all, apply_series, scratch_worktree
from tools.series.base import BASE_REF
from tools.series.series import Series, read_series

_PAIR = re.compile(r"\s*(\d+|-):\s+\S+ ([=!<>])\s+(\d+|-):\s+\S+ .*")
_HEADING = re.compile(r"^## re\.(\d+), (unreleased|\d{4}-\d{2}-\d{2})$", re.MULTILINE)


@dataclass(frozen=True)
class Change:
    """What became of a patch: added, changed, renamed or removed."""

    kind: str
    name: str
    subject: str

    def __str__(self) -> str:
        return f"{self.kind} `{self.name}`: {self.subject}"


@dataclass(frozen=True)
class Changes:
    """Everything that became of a line since a release, and the vLLM it stood on then."""

    line: str
    patches: tuple[Change, ...]
    old_version: str | None

    @property
    def heading(self) -> str:
        return f"### Patches of {self.line}"

    def render(self, version: str) -> str:
        """As lines of the changelog."""
        moved = self.old_version not in (None, version)
        base = f"On vLLM {version}" + (f", before on {self.old_version}" if moved else "") + "."
        lines = [f"- {change}" for change in self.patches]
        return "\n".join([self.heading, "", base, *([""] if lines else []), *lines]) + "\n"


def compare_ranges(output: str, old: Series, new: Series) -> tuple[Change, ...]:
    """Changes from the lines of ``git range-diff --no-patch``: those removed come last."""
    found: dict[int, Change] = {}
    removed = []
    for line in output.splitlines():
        match = _PAIR.fullmatch(line)
        assert match, line
        before = old.patches[int(match[1]) - 1] if match[1] != "-" else None
        after = new.patches[int(match[3]) - 1] if match[3] != "-" else None
        if after is None:
            assert before is not None
            removed.append(Change("removed", before.name, before.subject))
            continue
        if before is None:
            kind = "added"
        elif match[2] == "!":
            kind = "changed"
        elif before.name != after.name:
            kind = "renamed"
        else:
            continue
        found[int(match[3])] = Change(kind, after.name, after.subject)
    return (*(found[number] for number in sorted(found)), *removed)


def changes_since(project: Project, git: Git, series: Series, tag: str | None) -> Changes:
    """What changed in the series since a release, or everything when there was none.

    ``git`` is the build tree, with the series applied.
    """
    repository, patches = Git(project.root), f"patches/{project.line}"
    if tag is None or not repository.files(tag, patches):
        added = tuple(Change("added", patch.name, patch.subject) for patch in series)
        return Changes(project.line, added, None)
    archive = repository.run("archive", "--format=tar", tag, patches)
    with tempfile.TemporaryDirectory(prefix="re-release-") as name:
        place = Path(name)
        with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as tar:
            tar.extractall(place, filter="data")
        (place / "build").mkdir()
        project.downloads.mkdir(parents=True, exist_ok=True)
        (place / "build/downloads").symlink_to(project.downloads.resolve())
        then = Project(place, project.line, project.wheelhouse, project.offline)
        old = read_series(then.series_file)
        if then.pin.tree == project.pin.tree:
            base = BASE_REF
            with scratch_worktree(git) as scratch:
                head = am_all(scratch, old)
        else:
            apply_series(then, old, then.tree)
            git.run("fetch", "--quiet", "--no-tags", str(then.tree), BASE_REF)
            base = git.text("rev-parse", "FETCH_HEAD")
            git.run("fetch", "--quiet", "--no-tags", str(then.tree), "HEAD")
            head = git.text("rev-parse", "FETCH_HEAD")
        ranges = (f"{base}..{head}", f"{BASE_REF}..HEAD")
        output = git.text("range-diff", "--no-color", "--no-patch", "--creation-factor=60", *ranges)
    return Changes(project.line, compare_ranges(output, old, series), then.pin.version)


def section(text: str, number: int) -> tuple[str, str] | None:
    """State (``unreleased`` or a date) and text of a release's section, heading included."""
    headings = list(_HEADING.finditer(text))
    for at, heading in enumerate(headings):
        if int(heading[1]) == number:
            end = headings[at + 1].start() if at + 1 < len(headings) else len(text)
            return heading[2], text[heading.start() : end].rstrip() + "\n"
    return None


def date_section(text: str, number: int, date: str, patches: str) -> str:
    """The changelog with the section of ``number`` dated and its patches listed.

    A section that is not there is put before the first one. One that is dated already may get the
    patches of another line.

    >>> print(date_section("## re.1, unreleased\\n\\nText.\\n", 1, "2030-01-02", "More\\n"), end="")
    ## re.1, 2030-01-02
    <BLANKLINE>
    Text.
    <BLANKLINE>
    More
    """
    found = section(text, number)
    if found and found[0] != "unreleased" and patches.splitlines()[0] in found[1].splitlines():
        raise ToolError(
            "this release is prepared already",
            where=f"CHANGELOG.md, re.{number}",
            expected="unreleased",
            found=found[0],
            next_step="commit it, then: make release",
        )
    heading = f"## re.{number}, {date}"
    if found is None:
        first = _HEADING.search(text)
        at = first.start() if first else len(text)
        head = text[:at].rstrip("\n")
        rest = f"\n{text[at:]}" if text[at:] else ""
        return f"{head}\n\n{heading}\n\n{patches}{rest}"
    old = found[1]
    new = old.replace(f"## re.{number}, unreleased", heading, 1) + f"\n{patches}"
    return text.replace(old, new, 1)
