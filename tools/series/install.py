# SPDX-License-Identifier: Apache-2.0
"""The end of a rebase: the result is proved, then pin, patches and build tree are swapped.

The swap is a list of renames that can be undone or finished at any point.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from tools.common.cli import Tell
from tools.common.errors import ToolError
from tools.common.git import Git
from tools.common.pin import UNKNOWN, Project
from tools.series.apply import apply_series
from tools.series.base import BASE_REF, BRANCH
from tools.series.export import export_series
from tools.series.replay import (
    COMMAND,
    INSTALLING,
    OLD_APPLIED,
    OLD_BASE,
    REPLAYING,
    State,
    place,
    result,
    save,
)
from tools.series.series import Series, read_series, write_series
from tools.series.tree import (
    APPLIED_REF,
    open_tree,
    refuse_dirt,
    refuse_unaccounted,
    refuse_unfinished,
)


@dataclass(frozen=True)
class Rebased:
    """The result of a finished rebase."""

    patches: int
    range_diff: str
    kept_tree: Path | None
    commit: str  # of the submodule, now; UNKNOWN: it was left alone


def finish(project: Project, state: State, tell: Tell) -> Rebased:
    """Put the result of the replay in place, completely or not at all."""
    stage = place(project)
    if state.phase == REPLAYING:
        tell("writing the patches, and proving that they give back the commits")
        _prove(project, state)
        _copy_beside(project)
        state.phase, state.gitlink = INSTALLING, _read_gitlink(project)
        save(stage, state)
    commit = result(project, stage).pin.commit
    try:
        if state.gitlink and commit != UNKNOWN:
            _write_gitlink(project, commit)
        for there, new, old in _swaps(project):
            if new.exists():
                if there.exists():
                    there.rename(old)
                new.rename(there)
    except BaseException:
        undo(project, state)
        raise
    git = Git(project.tree)
    range_diff = git.run(
        *("-c", "core.abbrev=12", "range-diff", "--no-color"),
        *(f"{OLD_BASE}..{OLD_APPLIED}", f"{BASE_REF}..{APPLIED_REF}"),
    ).stdout.decode(errors="replace")
    for ref in (OLD_BASE, OLD_APPLIED):
        git.run("update-ref", "-d", ref)
    kept_tree = _keep_old_tree(project, state.before)
    (stage / "state.json").unlink()  # from here on, no rebase is under way
    _remove_leftovers(project)
    shutil.rmtree(stage)
    patches = len(read_series(project.series_file))
    return Rebased(patches, range_diff, kept_tree, commit if state.gitlink else UNKNOWN)


def _prove(project: Project, state: State) -> None:
    """Export the replayed commits and apply them again; refuse before anything is replaced."""
    stage = place(project)
    new = result(project, stage)
    kept = [p for p in read_series(project.series_file) if p.name not in state.left_out]
    if not kept:
        raise ToolError(
            "no patch is left of the series",
            where=stage,
            next_step=f"leave everything as it was: {COMMAND} --abort",
        )
    write_series(new.series_file, Series(tuple(kept)), list(state.left_out))
    try:
        export_series(new, new.series_file, stage / "vllm")
    except ToolError as error:
        raise ToolError(
            "the result cannot be a series yet; nothing was replaced",
            where=stage / "vllm",
            next_step=f"correct its commits (git rebase --interactive {BASE_REF}), then: "
            f"{COMMAND} --continue",
            details=str(error).splitlines(),
        ) from error
    apply_series(new, read_series(new.series_file), stage / "vllm")
    if project.tree.exists():  # it may hold what only it has
        git = open_tree(project.tree, project.pin)
        refuse_unfinished(git)
        refuse_dirt(git)
        refuse_unaccounted(git)


def _swaps(project: Project) -> list[tuple[Path, Path, Path]]:
    """What is replaced: its place, the new one and the old one, all on one file system."""
    line = project.patches
    beside = (line, line.with_name(f".{line.name}-new"), line.with_name(f".{line.name}-old"))
    return [beside, (project.tree, place(project) / "vllm", place(project) / "old-tree")]


def _copy_beside(project: Project) -> None:
    """Put a copy of the new pin and series beside the old ones; build/ may be another disk."""
    _remove_leftovers(project)
    _, beside, _ = _swaps(project)[0]
    shutil.copytree(result(project, place(project)).patches, beside)


def _remove_leftovers(project: Project) -> None:
    _, *others = _swaps(project)[0]
    for path in others:
        shutil.rmtree(path, ignore_errors=True)


def undo(project: Project, state: State) -> None:
    """Undo an installation, however far it came."""
    for there, new, old in _swaps(project):
        if old.exists():
            if there.exists():
                there.rename(new)
            old.rename(there)
    if state.gitlink:
        _write_gitlink(project, state.gitlink)
    state.phase, state.gitlink = REPLAYING, None
    save(place(project), state)
    _remove_leftovers(project)


def _read_gitlink(project: Project) -> str | None:
    """The submodule's commit in the repository's index, if there is one."""
    name = project.pin.submodule
    if name is None or not (project.root / ".git").exists():
        return None
    rows = Git(project.root).text("ls-files", "--stage", "--", name).splitlines()
    return next((row.split()[1] for row in rows if row.startswith("160000 ")), None)


def _write_gitlink(project: Project, commit: str) -> None:
    # The old pin is not there while the directories are swapped.
    entry = f"160000,{commit},{result(project, place(project)).pin.submodule}"
    Git(project.root).run("update-index", "--cacheinfo", entry)


def _keep_old_tree(project: Project, version: str) -> Path | None:
    """Move the old build tree aside if it has branches or stashes of its own; return where."""
    old = place(project) / "old-tree"
    if not old.exists():
        return None
    refs = Git(old).text("for-each-ref", "--format=%(refname)", "refs/heads", "refs/stash").split()
    if refs == [f"refs/heads/{BRANCH}"]:
        return None
    names = [f"vllm-{version}", *(f"vllm-{version}-{number}" for number in range(2, 1000))]
    kept = next(project.tree.with_name(n) for n in names if not project.tree.with_name(n).exists())
    old.rename(kept)
    return kept
