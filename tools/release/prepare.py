# SPDX-License-Identifier: Apache-2.0
"""A release is prepared as an edit that a person commits. Nothing here commits, tags or pushes."""

from __future__ import annotations

import argparse
import re
from dataclasses import dataclass
from pathlib import Path

from tools.common.cli import add_downloads, add_tree, tree_of
from tools.common.errors import ToolError
from tools.common.files import replacing_all
from tools.common.pin import Project
from tools.release.changes import Changes, changes_since, date_section
from tools.release.repository import open_repository, read_tags, refuse_stale
from tools.series.tree import open_tree
from tools.wheel.plan import tree_series

EXAMPLE = "--date 2030-01-31"


def declare(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--date", type=_date, help="YYYY-MM-DD (default: that of the last commit, in UTC)"
    )
    add_tree(parser)
    add_downloads(parser)


def _date(text: str) -> str:
    if not re.fullmatch(r"\d{4}-\d{2}-\d{2}", text):
        raise argparse.ArgumentTypeError("a date is YYYY-MM-DD")
    return text


def run(arguments: argparse.Namespace, project: Project) -> None:
    """Write number and changelog of the next release, both or neither. The changelog gets the
    patches that changed since the last tag re.<n>, by git range-diff; read it, edit it, commit
    it. Refuses uncommitted changes, a stale series and a release without changes."""
    done = prepare(project, tree_of(arguments, project), arguments.date)
    before = f"since re.{done.last}" if done.last is not None else "the first release"
    print(f"prepared: re.{done.number}, {before}")
    for change in done.changes.patches:
        print(f"  {change}")
    print("next: read CHANGELOG.md, edit what it says, commit; then: make release")


@dataclass(frozen=True)
class Prepared:
    """The edit that makes a release."""

    number: int
    last: int | None
    changes: Changes


def prepare(project: Project, tree: Path, date: str | None = None) -> Prepared:
    """Write number and changelog of the next release, both or neither.

    The number is that of pyproject.toml, or the next one if that is released. ``date`` is
    YYYY-MM-DD; the default is that of the last commit, in UTC.
    """
    git = open_repository(project)
    tags = read_tags(git)
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
    refuse_stale(project, tree)
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
    with replacing_all(texts):
        pass
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
