# SPDX-License-Identifier: Apache-2.0
"""Status report: which pin, how much of the series is applied, what changed since."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from packaging.version import Version
from rich.console import Console
from rich.table import Table
from rich.text import Text

from tools.common.cli import add_flag, add_series, add_tree, series_of, tree_of
from tools.common.errors import ToolError
from tools.common.git import Git
from tools.common.pin import Project
from tools.series.base import BASE_REF
from tools.series.export import export_series, format_patch, name_patches
from tools.series.patch import Patch
from tools.series.replay import INSTALLING, place, read_state
from tools.series.series import Series, fingerprint, read_series
from tools.series.tree import APPLIED_REF, open_tree, read_record, unaccounted
from tools.source.index import Index, releases

EXAMPLE = "--offline"
APPLIED, CHANGED, ABSENT = "applied", "differs", "not applied"


def declare(parser: argparse.ArgumentParser) -> None:
    add_series(parser)
    add_tree(parser)
    add_flag(parser, "--offline", "do not ask the package index for releases")


def run(arguments: argparse.Namespace, project: Project) -> None:
    """Show the state of the series on one screen: pin, newest release, every patch with its
    upstream status, what is applied, whether an export would change a file, what drifted. Works
    without a network: then the newest release is unknown."""
    newest = "unknown: not asked" if arguments.offline else newest_release(project)
    found = read_status(project, series_of(arguments, project), tree_of(arguments, project), newest)
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
            table.add_row(*map(Text, (patch.name, patch.status, *size, state)))
        console.print(table)


@dataclass(frozen=True)
class Status:
    """Status report."""

    patches: tuple[tuple[Patch, str], ...]  # with APPLIED, CHANGED or ABSENT
    lines: tuple[tuple[str, str], ...]  # topic and text


def newest_release(project: Project) -> str:
    """How far behind the newest release the pin is; unknown without an answer."""
    try:
        known = releases(Index().files(project.pin.source.distribution))
    except ToolError as error:
        return f"unknown: {error.what}"
    ahead = [version for version in known if version > Version(project.pin.version)]
    if not ahead:
        return f"{project.pin.version}, the pinned one"
    return f"{ahead[-1]}, {_count(len(ahead), 'release')} after the pinned one"


def _count(number: int, noun: str, plural: str | None = None) -> str:
    return f"{number} {noun if number == 1 else plural or noun + 's'}"


def read_status(project: Project, series_file: Path, tree: Path, newest: str) -> Status:
    """Look at pin, series and build tree; a problem with one does not hide the others."""
    pin = project.pin
    lines = [
        ("pin", f"vLLM {pin.version}, {pin.git_tag}, commit {pin.commit}"),
        ("source", f"{pin.source.filename}, sha256 {pin.source.sha256[:16]}..."),
        ("newest", newest),
    ]
    if state := read_state(project):
        waits = state.done < len(state.patches)
        at = f", waits at {state.patches[state.done]}" if waits else ""
        cut = ", interrupted while it was put in place" if state.phase == INSTALLING else ""
        lines.append(("rebase", f"onto vLLM {state.onto} in {place(project)}{at}{cut}"))
    try:
        series = read_series(series_file)
    except ToolError as error:
        return Status((), (*lines, ("series", f"cannot be read: {error.what}")))
    mark = fingerprint(series, pin)[:16]
    patches = _count(len(series), "patch", "patches")
    lines.append(("series", f"{patches}, fingerprint {mark}..."))
    try:
        git = open_tree(tree, pin)
    except ToolError as error:
        states = dict.fromkeys((patch.name for patch in series), ABSENT)
        lines.append(("applied", f"no: {error.what} ({tree})"))
        return Status(_with_states(series, states), tuple(lines))
    commits = _commits(git, series)
    states = {
        patch.name: ABSENT
        if patch.name not in commits
        else APPLIED
        if commits[patch.name] == patch.data
        else CHANGED
        for patch in series
    }
    count = sum(state == APPLIED for state in states.values())
    lines += [
        ("applied", f"{count} of {_count(len(series), 'patch', 'patches')} as they are, in {tree}"),
        ("export", _export(project, series_file, tree)),
        *_drift(git, project, series),
    ]
    return Status(_with_states(series, states), tuple(lines))


def _with_states(series: Series, states: dict[str, str]) -> tuple[tuple[Patch, str], ...]:
    return tuple((patch, states[patch.name]) for patch in series)


def _commits(git: Git, series: Series) -> dict[str, bytes]:
    """What each commit of the build tree would be as a patch, by the name that it would have."""
    commits = [c for c in git.commits(f"{BASE_REF}..HEAD") if len(git.parents(c)) == 1]
    drafts = [Patch("draft", format_patch(git, commit)) for commit in commits]
    try:
        names = name_patches([(d.subject, d.author, d.date) for d in drafts], series)
    except ToolError:  # two commits of one name: the export says so
        return {}
    return {name: draft.data for name, draft in zip(names, drafts, strict=True)}


def _export(project: Project, series_file: Path, tree: Path) -> str:
    try:
        done = export_series(project, series_file, tree, check=True)
    except ToolError as error:
        return f"not possible: {error.what}"
    if not done.stale:
        return "clean: it would change no file"
    return f"would change {_count(len(done.stale), 'file')}: {', '.join(done.stale)}"


def _drift(git: Git, project: Project, series: Series) -> Sequence[tuple[str, str]]:
    found = []
    if dirt := git.dirt():
        found.append(f"{_count(len(dirt), 'file')} changed and not committed in the build tree")
    if lost := unaccounted(git):
        found.append(
            f"{_count(len(lost), 'commit')} not exported: "
            + ", ".join(git.text("log", "-1", "--format=%s", commit) for commit in lost)
        )
    record = read_record(git)
    head_is_known = record is not None and record.tree == git.tree_id("HEAD")
    if record and record.fingerprint != fingerprint(series, project.pin):
        at = "since the apply" if git.commit_id(APPLIED_REF) else ""
        found.append(f"the patches changed {at}".strip())
    elif not head_is_known and not lost and not dirt:
        found.append("the build tree is not at the last apply or export")
    return [("drift", line) for line in found] or [("drift", "none")]
