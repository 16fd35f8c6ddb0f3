# SPDX-License-Identifier: Apache-2.0
"""The room of the patch series."""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from tools.apply import apply_series
from tools.commands.common import Room, add_series, add_tree, progress
from tools.errors import ToolError
from tools.export import export_series
from tools.pin import Project
from tools.series import Series, check_series, fingerprint, read_series
from tools.source import Archive, choose_source, fetch_source


def add(parent: argparse._SubParsersAction) -> None:
    room = Room(parent, "series", "the patches, as files and as commits")

    parser = room.verb("apply", apply, "--pristine --tree build/pristine/vllm")
    add_series(parser)
    add_tree(parser)
    parser.add_argument("--pristine", action="store_true", help="apply no patch at all")
    parser.add_argument("--before", metavar="PATCH", help="stop before this patch")
    parser.add_argument(
        "--refresh",
        action="store_true",
        help="take patches that moved or were edited by hand (never with fuzz); then export",
    )
    parser.add_argument(
        "--discard", action="store_true", help="lose what the build tree has beyond the series"
    )

    parser = room.verb("export", export, "--check")
    add_series(parser)
    add_tree(parser)
    parser.add_argument(
        "--check", action="store_true", help="write nothing; fail if a file would change"
    )
    parser.add_argument(
        "--drop",
        metavar="PATCH",
        action="append",
        default=[],
        help="this patch goes: its commit is gone on purpose (may be repeated)",
    )

    add_series(room.verb("check", check, ""))
    add_series(room.verb("list", list_patches, ""))
    add_series(room.verb("fingerprint", print_fingerprint, "--series patches/series"))


def _series_file(arguments: argparse.Namespace, project: Project) -> Path:
    return arguments.series or project.series_file


def apply(arguments: argparse.Namespace, project: Project) -> int:
    """Bring the build tree to the pinned release plus one commit for each patch. All or nothing:
    a patch that does not fit exactly changes nothing. The commit ids are the same on every
    machine. Refuses over uncommitted changes, and over commits that the series cannot give back."""
    series = Series()
    if not arguments.pristine:
        series = read_series(_series_file(arguments, project))
    if arguments.before:
        series = series.before(arguments.before)
    tree = arguments.tree or project.tree
    if not tree.exists() and isinstance(choose_source(project), Archive):
        with progress(project.pin.source) as advance:
            fetch_source(project, advance)
    done = apply_series(project, series, tree, discard=arguments.discard, refresh=arguments.refresh)
    if done.source:
        print(f"source: {done.source}")
    state = "applied" if done.changed else "nothing to do"
    print(f"{state}: {done.patches} patches on {project.pin.git_tag} in {tree}")
    print(f"commit: {done.commit}")
    return 0


def export(arguments: argparse.Namespace, project: Project) -> int:
    """Write the commits of the build tree to patches/, one file each. All or nothing; a patch
    keeps its file name through edits, and a commit that did not change keeps its bytes."""
    done = export_series(
        project,
        _series_file(arguments, project),
        arguments.tree or project.tree,
        check=arguments.check,
        drop=arguments.drop,
    )
    if arguments.check and done.stale:
        raise ToolError(
            f"{len(done.stale)} files of the series are not what the build tree exports",
            found="stale",
            next_step="python -m tools series export",
            details=done.stale,
        )
    for name in done.written:
        print(f"wrote {name}")
    for name in done.removed:
        print(f"removed {name}")
    print(f"series: {len(done.series)} patches, {len(done.stale)} files changed")
    return 0


def check(arguments: argparse.Namespace, project: Project) -> int:
    """Check the series and every patch against the rules. Each listed file exists, none is listed
    twice or left out; headers, message body, sign-off, paths and trailing blanks are right."""
    series = check_series(_series_file(arguments, project))
    print(f"series: {len(series)} patches, no problems")
    return 0


def list_patches(arguments: argparse.Namespace, project: Project) -> int:
    """Show the series as a table: name, subject, upstream status, size, files."""
    series = read_series(_series_file(arguments, project))
    table = Table("patch", "subject", "status", "+", "-", "files", title=None)
    for patch in series:
        counts = (patch.diff.added, patch.diff.removed, len(patch.diff))
        # As Text: a subject's [Core] is no markup.
        row = (patch.name, patch.subject, patch.status, *map(str, counts))
        table.add_row(*(Text(cell) for cell in row))
    Console().print(table)
    return 0


def print_fingerprint(arguments: argparse.Namespace, project: Project) -> int:
    """Print one sha256 over the pin's source, the order of the series and every byte of it."""
    print(fingerprint(read_series(_series_file(arguments, project)), project.pin))
    return 0
