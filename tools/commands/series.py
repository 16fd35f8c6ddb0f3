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
from tools.pin import UNKNOWN, Project
from tools.rebase import (
    abort,
    attempt,
    begin,
    go_on,
    leave_out,
    refuse_other_rebase,
    render_trials,
)
from tools.series import Series, check_series, fingerprint, read_series
from tools.source import Archive, choose_source, fetch_source
from tools.status import newest_release, read_status
from tools.submit import find_base, rules, submit
from tools.target import Target, find_target
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

    parser = room.verb("rebase", rebase, "--onto 1.2.3 --dry-run")
    step = parser.add_mutually_exclusive_group(required=True)
    step.add_argument("--onto", metavar="VERSION_OR_REF", help="begin: a release, or a git ref")
    for flag, text in {
        "continue": "go on after the conflict was resolved",
        "skip": "leave the patch that conflicts out of the series",
        "drop": "drop the patch that the release contains already",
        "abort": "leave everything as it was before --onto",
    }.items():
        step.add_argument(
            f"--{flag}", dest="step", action="store_const", const=flag, help=f"then: {text}"
        )
    parser.add_argument("--clone", type=Path, help="a clone of vLLM that has the ref or the tag")
    parser.add_argument("--commit", help="the commit of the release's tag, where no clone says it")
    parser.add_argument(
        "--without-wheels", action="store_true", help="go on where a variant has no base wheel"
    )
    parser.add_argument(
        "--drop-contained", action="store_true", help="drop what the release contains, and go on"
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="only say what would conflict where; change nothing"
    )
    parser.add_argument("--out", type=Path, help="with --dry-run: write the table there, Markdown")

    parser = room.verb("submit", submit_patches, "count-rows --clone ../vllm --onto origin/main")
    parser.add_argument(
        "patches", nargs="*", metavar="PATCH", help="which (default: all that are Pending)"
    )
    parser.add_argument("--clone", type=Path, help="your clone of vLLM: it gets the branches")
    parser.add_argument("--onto", metavar="REF", help="where they start, in the clone")
    parser.add_argument("--topic", metavar="BRANCH", help="one branch of all the patches")
    parser.add_argument(
        "--after",
        action="append",
        default=[],
        metavar="PATCH",
        help="stand on this earlier patch too, although nothing of it is named (may be repeated)",
    )
    parser.add_argument(
        "--trailer",
        action="append",
        default=[],
        metavar="'KEY: VALUE'",
        help="add to each message, as Assisted-by: ... (may be repeated)",
    )
    parser.add_argument("--replace", action="store_true", help="replace branches of these names")
    parser.add_argument(
        "--test", action="store_true", help="check each branch here (on the pin), for the results"
    )
    parser.add_argument(
        "--out", type=Path, help="where the texts of the pull requests go (default: build/submit)"
    )

    parser = room.verb("status", status, "--offline")
    add_series(parser)
    add_tree(parser)
    parser.add_argument(
        "--offline", action="store_true", help="do not ask the package index for releases"
    )

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


def rebase(arguments: argparse.Namespace, project: Project) -> int:
    """Move the series to another vLLM: a release of the package index by version, or a git ref of
    a clone. Replays the patches in build/rebase/vllm by three-way merge and stops at a conflict,
    or at a patch that the target contains. At the end patches/, upstream.toml (source, base
    wheels) and build/vllm are replaced, all or nothing, and a range-diff is shown. Never pushes
    and never commits here."""
    if arguments.onto is None:
        _refuse_begin_flags(arguments)
        if arguments.step == "abort":
            state = abort(project)
            print(f"given up: the rebase onto vLLM {state.onto}; everything is as it was")
            return 0
        if arguments.step in ("skip", "drop"):
            leave_out(project, contained=arguments.step == "drop")
        return _go_on(project)
    refuse_other_rebase(project)
    if arguments.out and not arguments.dry_run:
        raise ToolError("--out goes with --dry-run", found=arguments.out)
    target = find_target(project, arguments.onto, arguments.clone, arguments.commit, progress)
    _show_target(target)
    if target.source.sha256 == project.pin.source.sha256:
        print(f"nothing to do: the series stands on vLLM {target.version}")
        return 0
    if arguments.dry_run:
        trials = attempt(project, target, arguments.clone, _tell)
        text = render_trials(trials, target, project.pin.version)
        print(text)
        if arguments.out:
            arguments.out.write_text(text, encoding="utf-8")
        return 0
    begin(
        project,
        target,
        clone=arguments.clone,
        without_wheels=arguments.without_wheels,
        drop_contained=arguments.drop_contained,
    )
    return _go_on(project)


def _refuse_begin_flags(arguments: argparse.Namespace) -> None:
    begins = {
        "--clone": arguments.clone,
        "--commit": arguments.commit,
        "--without-wheels": arguments.without_wheels,
        "--drop-contained": arguments.drop_contained,
        "--dry-run": arguments.dry_run,
        "--out": arguments.out,
    }
    if given := [flag for flag, value in begins.items() if value]:
        raise ToolError(
            "these belong to the beginning of a rebase",
            where=f"--{arguments.step}",
            found=", ".join(given),
            next_step="leave them out, or begin again: --abort, then --onto",
        )


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _show_target(target: Target) -> None:
    print(f"onto: vLLM {target.version} ({target.tag}, commit {target.commit})")
    for what, file in {"source": target.source, **target.wheels}.items():
        said = f"{file.filename}, sha256 {file.sha256}" if file else "no base wheel"
        print(f"{what}: {said}")
    for note in target.notes:
        print(f"note: {note}")


def _go_on(project: Project) -> int:
    before = project.pin.version
    done = go_on(project, _tell)
    print(done.range_diff, end="")
    print(f"rebased: {done.patches} patches from vLLM {before} onto {done.onto}")
    for name, why in done.left_out.items():
        print(f"left out: {name} ({why})")
    if done.commit == UNKNOWN:
        print(f"note: the commit of the submodule {project.submodule.name}/ was left as it was")
    if done.kept_tree:
        print(f"note: the build tree before has branches or stashes, kept in {done.kept_tree}")
    print("next: make lock && make install && make test; then commit what changed")
    return 0


def submit_patches(arguments: argparse.Namespace, project: Project) -> int:
    """Make branches for upstream, one a patch or topic, signed off by you (git config), and write
    the text of each pull request. A patch that needs earlier ones stands on them. Stops before
    anything is pushed: you read, own and send it. Without --clone the branches stand on the pinned
    release, in build/vllm."""
    out = arguments.out or project.root / "build" / "submit"
    branches = submit(
        project,
        arguments.patches,
        onto=arguments.onto,
        clone=arguments.clone,
        topic=arguments.topic,
        out=out,
        after=arguments.after,
        trailers=arguments.trailer,
        replace=arguments.replace,
        site=find_site(Path(sys.executable)) if arguments.test else None,
        tell=_tell,
    )
    base = find_base(project, arguments.onto, arguments.clone)
    for branch in branches:
        state = "" if branch.fresh else " (as it was)"
        print(f"branch {branch.name}{state}: {', '.join(branch.patches)}")
        if branch.below:
            print(f"  stacked on {', '.join(branch.below)}: these go first, or with it")
        print(f"  pull request: {branch.text}")
    print(f"\nIn {base.git.path}. Nothing was pushed; that is yours to do, when you")
    print("  - have read every changed line and can defend it,")
    print("  - have looked for issues and pull requests that do the same,")
    print("  - have run the test plan, and filled in the dots of the text,")
    print("  - say where AI helped (--trailer 'Assisted-by: ...', and in the text).")
    if found := rules(base):
        print(f"vLLM's own rules, as of {base.label}: {', '.join(found)}")
    if not base.is_clone:
        print("These branches have the release's files but not its history: to send one, make it")
        print("in a clone: --clone <path> --onto <ref>")
    return 0


def status(arguments: argparse.Namespace, project: Project) -> int:
    """Say where the series stands, on one screen: pin, newest release, every patch with its
    upstream status, what is applied, whether an export would change a file, what drifted. Works
    without a network: then the newest release is unknown."""
    newest = "unknown: not asked" if arguments.offline else newest_release(project)
    series_file = arguments.series or project.series_file
    found = read_status(project, series_file, arguments.tree or project.tree, newest)
    console = Console()
    facts = Table.grid(padding=(0, 2))
    for what, said in found.lines:
        facts.add_row(what, Text(said, overflow="fold"))
    console.print(facts)
    if found.patches:
        table = Table("patch", "upstream", "+", "-", "build tree", box=None)
        for patch, state in found.patches:
            try:
                size = (str(patch.diff.added), str(patch.diff.removed))
            except ToolError as error:
                size, state = ("?", "?"), error.what
            table.add_row(*(Text(cell) for cell in (patch.name, patch.status, *size, state)))
        console.print(table)
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
