# SPDX-License-Identifier: Apache-2.0
"""The room of releases. Nothing here commits, tags, pushes or publishes."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from tools.commands.common import Room, add_downloads, add_tree, progress
from tools.pin import Project
from tools.release import build, prepare


def add(parent: argparse._SubParsersAction) -> None:
    room = Room(parent, "release", "releases of the series; nothing is ever pushed or published")

    parser = room.verb("prepare", prepare_release, "--date 2030-01-31")
    parser.add_argument(
        "--date", type=_date, help="YYYY-MM-DD (default: that of the last commit, in UTC)"
    )
    add_tree(parser)
    add_downloads(parser)

    parser = room.verb("build", build_release, "--out build/release/re.1")
    parser.add_argument("--out", type=Path, help="where it goes (default: build/release/re.<n>)")
    add_tree(parser)
    add_downloads(parser)


def _date(text: str) -> str:
    if not re.fullmatch(r"\d{4}-\d{2}-\d{2}", text):
        raise argparse.ArgumentTypeError("a date is YYYY-MM-DD")
    return text


def prepare_release(arguments: argparse.Namespace, project: Project) -> int:
    """Write number and changelog of the next release, both or neither. The changelog gets the
    patches that changed since the last tag re.<n>, by git range-diff; read it, edit it, commit
    it. Refuses uncommitted changes, a stale patches/ and a release without changes."""
    done = prepare(project, arguments.tree or project.tree, arguments.date)
    before = f"since re.{done.last}" if done.last is not None else "the first release"
    print(f"prepared: re.{done.number}, {before}")
    for change in done.changes.patches:
        print(f"  {change}")
    print("next: read CHANGELOG.md, edit what it says, commit; then: make release")
    return 0


def build_release(arguments: argparse.Namespace, project: Project) -> int:
    """Build the prepared release of this commit: wheels, proved; bills of materials; provenance
    (in-toto, SLSA); checksums. All or nothing; the same commit gives the same bytes. Refuses
    uncommitted changes, a stale patches/, a release that is not prepared, and a version that is
    released already."""
    out = arguments.out or project.root / "build" / "release" / f"re.{project.release}"
    done = build(project, arguments.tree or project.tree, out, progress)
    state = "built" if done.changed else "built again, the same bytes"
    print(f"{state}: re.{done.number} in {done.path}")
    for name in done.files:
        print(f"  {name}")
    print("Nothing was tagged, pushed or published; that is a person's to do, and to sign:")
    print(f"next: git tag --annotate re.{done.number}")
    return 0
