# SPDX-License-Identifier: Apache-2.0
"""The room of the patch series."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from tools.apply import apply_series
from tools.check_patches import CHECKS, Checker, places, render
from tools.commands.common import Room, add_downloads, add_series, add_tree, progress
from tools.errors import ToolError
from tools.export import export_series
from tools.pin import Project
from tools.series import Series, check_series, fingerprint, read_series
from tools.source import Archive, choose_source, fetch_source
from tools.tree import open_tree
from tools.verify import find_site, verify_installed


def add(parent: argparse._SubParsersAction) -> None:
    room = Room(parent, "series", "the patches, as files and as commits")

    parser = room.verb("apply", apply, "--pristine --tree build/pristine/vllm")
    add_series(parser)
    add_tree(parser)
    add_downloads(parser)
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

    parser = room.verb("check-patches", check_each, "--out benchmarks/results/check-patches.md")
    parser.add_argument("patches", nargs="*", metavar="PATCH", help="only these (default: all)")
    parser.add_argument("--out", type=Path, help="where the table goes, as Markdown")
    parser.add_argument(
        "--installed",
        type=Path,
        default=Path(sys.executable),
        metavar="SITE",
        help="the wheel of the series, installed (default: in this Python)",
    )
    add_series(parser)
    add_tree(parser)

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


def check_each(arguments: argparse.Namespace, project: Project) -> int:
    """Check every patch at its own place: vLLM imports, its linters pass on the files touched, mypy
    finds nothing that it does not find before the patch, and the tests touched pass. What was
    checked is not checked again, so an interrupted run goes on. Wants the wheel of the series
    installed."""
    series = read_series(_series_file(arguments, project))
    tree = arguments.tree or project.tree
    verify_installed(project, arguments.installed, tree, _series_file(arguments, project))
    git = open_tree(tree, project.pin)
    checker = Checker(git, find_site(arguments.installed), project.root / "build" / "check-patches")
    start = time.monotonic()
    rows = []
    for patch, place in zip(series, places(git), strict=True):
        if arguments.patches and patch.name not in arguments.patches:
            continue
        findings = {}
        for check in CHECKS:
            found = findings[check] = checker.check(place, check)
            said = found.said if found.good else f"FAILED: {found.said}"
            seconds = time.monotonic() - start
            print(f"{seconds:5.0f} s  {patch.name:36}  {check:8}  {said}", file=sys.stderr)
        rows.append((patch.name, findings))
    if arguments.out:
        about = [
            f"{len(rows)} patches on vLLM {project.pin.version}, each with those before it and "
            "none after it, on a CPU. Imports: the modules it touches, and the server's. Linters: "
            "vLLM's own rules and hooks (SPDX headers among them) pass on the files it touches. "
            "Types: mypy finds nothing that it does not find before the patch. Tests: the files "
            "it touches. `make check-patches` writes this file.",
        ]
        arguments.out.write_text(render(rows, about), encoding="utf-8")
    failed = [
        f"{name}, {check}: {found.said}\n{found.details}"
        for name, findings in rows
        for check, found in findings.items()
        if not found.good
    ]
    if failed:
        raise ToolError(
            f"{len(failed)} checks of patches failed",
            where=arguments.out,
            next_step="mend the patch (CONTRIBUTING.md, Editing a patch), then: make check-patches",
            details="\n".join(failed).splitlines(),
        )
    print(f"series: {len(rows)} patches hold at their own places")
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
