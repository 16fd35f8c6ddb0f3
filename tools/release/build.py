# SPDX-License-Identifier: Apache-2.0
"""The prepared release of a commit. Nothing here tags, pushes or publishes.

What is built depends on the commit alone, so anybody can build a release again and compare.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

from tools.common.cli import add_downloads, add_tree, tree_of
from tools.common.errors import ToolError
from tools.common.files import digest_of, staging
from tools.common.pin import Project
from tools.release.changes import section
from tools.release.provenance import make_provenance
from tools.release.repository import open_repository, read_tags, refuse_stale
from tools.series.tree import open_tree
from tools.wheel.build import build_wheel
from tools.wheel.plan import tree_series, wheel_version
from tools.wheel.sbom import make_sbom
from tools.wheel.verify import verify_wheel

EXAMPLE = "--out build/release/re.1"
CHECKSUMS = "SHA256SUMS"


def declare(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--out", type=Path, help="where it goes (default: build/<line>/release/re.<n>)"
    )
    add_tree(parser)
    add_downloads(parser)


def run(arguments: argparse.Namespace, project: Project) -> None:
    """Build the prepared release of this commit: wheels, proved; bills of materials; provenance
    (in-toto, SLSA); checksums. No wheel that is for tests only. All or nothing; the same commit
    gives the same bytes. Refuses uncommitted changes, a stale series, a release that is not
    prepared, and a version that is released already."""
    out = arguments.out or project.build / "release" / f"re.{project.release}"
    done = build(project, tree_of(arguments, project), out)
    state = "built" if done.changed else "built again, the same bytes"
    print(f"{state}: re.{done.number} in {done.path}")
    for name in done.files:
        print(f"  {name}")
    print("Nothing was tagged, pushed or published: do that yourself, and sign it:")
    print(f"next: git tag --annotate re.{done.number}")


@dataclass(frozen=True)
class Released:
    """A release on disk."""

    number: int
    path: Path
    files: tuple[str, ...]
    changed: bool  # whether it was written now, or was there already


def build(project: Project, tree: Path, out: Path) -> Released:
    """Build the prepared release of HEAD into ``out``, completely or not at all.

    One wheel for each base wheel of the pin, proved, less those that are for tests only; for each
    its bill of materials and its provenance; the section of the changelog; the checksums of all. A
    release that is there already is built again and compared.
    """
    git = open_repository(project)
    number, tags = project.release, read_tags(git)
    commit = git.text("rev-parse", "HEAD")
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
    refuse_stale(project, tree)
    series = tree_series(open_tree(tree, project.pin), project, project.series_file)
    if not series:
        raise ToolError("there is nothing to release", found="no patches")
    wheels = {v: base for v, base in project.pin.wheels.items() if not base.tests_only}
    if not wheels:
        raise ToolError(
            "this line has no wheel that may be released",
            where=project.pin_file,
            expected=f"a base wheel of vLLM {project.pin.version}",
            found=f"for tests only: {', '.join(project.pin.wheels) or 'none'}",
        )
    with staging(out) as stage:
        for variant, base in wheels.items():
            built = build_wheel(project, variant, tree, project.series_file, stage)
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
        changed = not out.exists()
        if changed:
            stage.rename(out)
        else:
            _compare(out, stage)
    return Released(number, out, (*sums, CHECKSUMS), changed)


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
