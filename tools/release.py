# SPDX-License-Identifier: Apache-2.0
"""A release of the series: prepared as an edit that a person commits, then built from that commit.

Nothing here commits, tags, pushes or publishes. What is built depends on the commit alone, so
anybody can build a release again and compare.
"""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

from tools.changes import Changes, changes_since, date_section, section
from tools.download import Advance, digest_of
from tools.errors import ToolError
from tools.export import export_series
from tools.git import Git
from tools.pin import PinnedFile, Project
from tools.provenance import make_provenance
from tools.sbom import make_sbom
from tools.series import check_series
from tools.tree import open_tree
from tools.verify import verify_wheel
from tools.wheel import build_wheel, tree_series, wheel_version

CHECKSUMS = "SHA256SUMS"


@dataclass(frozen=True)
class Prepared:
    """The edit that makes a release."""

    number: int
    last: int | None
    changes: Changes


@dataclass(frozen=True)
class Released:
    """A release on disk."""

    number: int
    path: Path
    files: tuple[str, ...]
    changed: bool  # whether it was written now, not found as it is


def _repository(project: Project) -> Git:
    """The project's own repository, with nothing that is not committed."""
    git = Git(project.root)
    if not (project.root / ".git").exists() or git.commit_id("HEAD") is None:
        raise ToolError(
            "a release is made from a commit",
            where=project.root,
            expected="a git repository with a commit",
        )
    if dirt := git.dirt():
        raise ToolError(
            "the repository has changes that are not committed",
            where=project.root,
            expected="a clean work tree",
            found=f"{len(dirt)} changed or untracked files",
            next_step="commit or stash them",
            details=dirt[:20],
        )
    return git


def _tags(git: Git) -> dict[int, str]:
    """Commits of the releases made so far, by number."""
    names = git.text("tag", "--list", "re.*").split()
    found = {int(name[3:]): git.commit_id(name) for name in names if re.fullmatch(r"re\.\d+", name)}
    return {number: commit for number, commit in found.items() if commit is not None}


def _refuse_stale(project: Project, tree: Path) -> None:
    check_series(project.series_file)
    stale = export_series(project, project.series_file, tree, check=True).stale
    if stale:
        raise ToolError(
            "the build tree has what patches/ has not",
            where=tree,
            expected="what the build tree exports",
            found=f"{len(stale)} files of the series that are not that",
            next_step="python -m tools series export, and commit; or series apply",
            details=stale,
        )


def prepare(project: Project, tree: Path, date: str | None = None) -> Prepared:
    """Write number and changelog of the next release, both or neither.

    The number is that of pyproject.toml, or the next one if that is released. ``date`` is
    YYYY-MM-DD; the default is that of the last commit, in UTC.
    """
    git = _repository(project)
    tags = _tags(git)
    last = max(tags, default=None)
    number = project.release
    if last is not None and number == last:
        number += 1
    if last is not None and number != last + 1:
        raise ToolError(
            "the release number does not follow the last release",
            where="pyproject.toml, [project].version",
            expected=f'"{last}" or "{last + 1}"',
            found=f'"{number}"',
        )
    build = open_tree(tree, project.pin)
    _refuse_stale(project, tree)
    series = tree_series(build, project, project.series_file)
    changes = changes_since(project, build, series, f"re.{last}" if last is not None else None)
    if not changes.patches and changes.old_version in (None, project.pin.version):
        raise ToolError(
            "there is nothing to release",
            expected="a patch, or the pin, changed since the last release",
            found=f"the series of re.{last}" if last is not None else "no patches",
        )
    date = date or git.text("log", "-1", "--date=format-local:%Y-%m-%d", "--format=%cd")
    changelog, settings = project.root / "CHANGELOG.md", project.root / "pyproject.toml"
    if not changelog.is_file():
        raise ToolError("there is no changelog", where=changelog)
    text = changelog.read_text(encoding="utf-8")
    texts = {
        changelog: date_section(text, number, date, changes.render(project.pin.version)),
        settings: _set_number(settings.read_text(encoding="utf-8"), number),
    }
    _write_all(texts)
    return Prepared(number, last, changes)


def _set_number(text: str, number: int) -> str:
    """``pyproject.toml`` with another [project].version, its other bytes as they are."""
    head, table, rest = text.partition("[project]\n")
    rest, count = re.subn(
        r'^version = "\d+"$', f'version = "{number}"', rest, count=1, flags=re.MULTILINE
    )
    if not count:
        raise ToolError(
            "the release number cannot be written",
            where="pyproject.toml, [project]",
            expected='a line version = "1"',
        )
    return head + table + rest


def _write_all(texts: dict[Path, str]) -> None:
    """Replace several files; an error leaves all of them as they were."""
    old = {path: path.read_bytes() for path in texts}
    try:
        for path, text in texts.items():
            partial = path.with_name(f".{path.name}.new")
            partial.write_text(text, encoding="utf-8")
            partial.replace(path)
    except BaseException:
        for path, data in old.items():
            path.with_name(f".{path.name}.new").unlink(missing_ok=True)
            path.write_bytes(data)
        raise


def _silent(pinned: PinnedFile) -> AbstractContextManager[Advance]:
    return nullcontext(lambda count: None)


def build(
    project: Project,
    tree: Path,
    out: Path,
    progress: Callable[[PinnedFile], AbstractContextManager[Advance]] = _silent,
) -> Released:
    """Build the prepared release of HEAD into ``out``, completely or not at all.

    One wheel for each base wheel of the pin, proved; for each its bill of materials and its
    provenance; the section of the changelog; the checksums of all. A release that is there
    already is built again and compared.
    """
    git = _repository(project)
    number, tags = project.release, _tags(git)
    commit = git.commit_id("HEAD")
    assert commit is not None
    if number in tags and tags[number] != commit:
        raise ToolError(
            "this version is released already",
            where=f"the tag re.{number}",
            expected="no such tag, or one of this commit",
            found=git.oneline(tags[number]),
            next_step="make release-prepare, or check out the tag to build it again",
        )
    if later := [known for known in tags if known > number]:
        raise ToolError(
            "a later version is released already",
            where="pyproject.toml, [project].version",
            expected=f'"{max(later) + 1}"',
            found=f'"{number}"',
            next_step="make release-prepare",
        )
    changelog = project.root / "CHANGELOG.md"
    text = changelog.read_text(encoding="utf-8") if changelog.is_file() else ""
    notes = section(text, number)
    if notes is None or notes[0] == "unreleased":
        raise ToolError(
            "this release is not prepared",
            where=f"CHANGELOG.md, re.{number}",
            expected="a section with a date",
            found=notes[0] if notes else "no such section",
            next_step="make release-prepare",
        )
    _refuse_stale(project, tree)
    series = tree_series(open_tree(tree, project.pin), project, project.series_file)
    if not series:
        raise ToolError("there is nothing to release", found="no patches")
    out.parent.mkdir(parents=True, exist_ok=True)
    stage = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent))
    try:
        stage.chmod(0o755)
        for variant, base in project.pin.wheels.items():
            with progress(base.file) as advance:
                built = build_wheel(
                    project, variant, tree, project.series_file, stage, advance=advance
                )
            verify_wheel(project, built.path, tree, project.series_file)
            version = wheel_version(project.pin, base, number)
            sbom = make_sbom(project.pin, base, series, version)
            provenance = make_provenance(
                project.pin,
                base,
                series,
                release=number,
                commit=commit,
                filename=built.path.name,
                sha256=built.sha256,
            )
            (stage / f"{built.path.name}.cdx.json").write_bytes(sbom)
            (stage / f"{built.path.name}.intoto.json").write_bytes(provenance)
        (stage / "CHANGES.md").write_text(notes[1], encoding="utf-8")
        sums = {path.name: digest_of(path) for path in sorted(stage.iterdir())}
        lines = "".join(f"{digest}  {name}\n" for name, digest in sums.items())
        (stage / CHECKSUMS).write_text(lines, encoding="utf-8")
        files = (*sums, CHECKSUMS)
        if out.exists():
            _compare(out, stage)
            return Released(number, out, files, changed=False)
        stage.rename(out)
    finally:
        shutil.rmtree(stage, ignore_errors=True)
    return Released(number, out, files, changed=True)


def _compare(there: Path, made: Path) -> None:
    """Refuse to take the place of a release with other bytes."""
    found, expected = (
        {path.name: digest_of(path) for path in place.iterdir()} for place in (there, made)
    )
    differing = sorted(name for name in found | expected if found.get(name) != expected.get(name))
    if differing:
        raise ToolError(
            "another release of this number lies there; it was left as it is",
            where=there,
            expected="what this commit gives",
            found=f"{len(differing)} files that differ",
            next_step="move it away, then run the command again",
            details=differing,
        )
