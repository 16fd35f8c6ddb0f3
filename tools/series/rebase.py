# SPDX-License-Identifier: Apache-2.0
"""The series on another release: replayed in ``build/<line>/rebase``, put in place as one act."""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

from tools.common.cli import add_flag, tell
from tools.common.errors import ToolError
from tools.common.files import staging
from tools.common.git import Git
from tools.common.pin import UNKNOWN, Project
from tools.series.base import BASE_REF
from tools.series.install import finish, undo
from tools.series.replay import (
    COMMAND,
    CONTAINED,
    INSTALLING,
    REPLAYING,
    State,
    Trial,
    attempt,
    catch_up,
    forget_pick,
    leave_out,
    need_state,
    old_commits,
    place,
    read_state,
    render_trials,
    replay,
    save,
    set_up,
    state_of,
)
from tools.series.series import read_series
from tools.series.target import Target, find_target

EXAMPLE = "--onto 1.2.3 --dry-run"

_STEPS = {
    "continue": "after the conflict was resolved",
    "skip": "leave the patch that conflicts out of the series",
    "drop": "drop the patch that the release contains already",
    "abort": "leave everything as it was before --onto",
}


def declare(parser: argparse.ArgumentParser) -> None:
    step = parser.add_mutually_exclusive_group(required=True)
    step.add_argument("--onto", metavar="VERSION_OR_REF", help="begin: a release, or a git ref")
    for flag, text in _STEPS.items():
        step.add_argument(
            f"--{flag}", dest="step", action="store_const", const=flag, help=f"then: {text}"
        )
    begin = parser.add_argument_group("with --onto")
    begin.add_argument("--clone", type=Path, help="a clone of vLLM that has the ref or the tag")
    begin.add_argument("--commit", help="the commit of the release's tag, where no clone has it")
    add_flag(begin, "--without-wheels", "go on where a variant has no base wheel")
    add_flag(begin, "--drop-contained", "drop what the release contains, and go on")
    add_flag(begin, "--dry-run", "only show what would conflict; change nothing")
    begin.add_argument("--out", type=Path, help="with --dry-run: write the table there, Markdown")


def run(arguments: argparse.Namespace, project: Project) -> None:
    """Move the series to another vLLM: a release of the package index by version, or a git ref of
    a clone. Replays the patches in build/<line>/rebase by three-way merge (git cherry-pick) and
    stops at a conflict, or at a patch that the target contains. At the end patches/<line> (with the
    pin: source, base wheels) and the build tree are replaced, all or nothing, and a range-diff is
    shown. Never pushes and never commits here."""
    if arguments.onto is None:
        _refuse_begin_flags(arguments)
        state = need_state(project)
        if arguments.step == "abort":
            abort(project, state)
            print(f"given up: the rebase onto vLLM {state.onto}; everything is as it was")
            return
        if arguments.step in ("skip", "drop"):
            _leave_out(project, state, contained=arguments.step == "drop")
        _go_on(project, state)
        return
    if state_now := read_state(project):
        raise ToolError(
            "a rebase is under way already",
            where=place(project),
            found=f"onto vLLM {state_now.onto}, {state_now}",
            next_step=f"{COMMAND} --continue, or give it up: {COMMAND} --abort",
        )
    if arguments.out and not arguments.dry_run:
        raise ToolError("--out goes with --dry-run", found=arguments.out)
    target = find_target(project, arguments.onto, arguments.clone, arguments.commit)
    _show_target(target)
    if target.source.sha256 == project.pin.source.sha256:
        print(f"nothing to do: the series stands on vLLM {target.version}")
    elif arguments.dry_run:
        text = render_trials(try_all(project, target, arguments.clone), target, project.pin.version)
        print(text)
        if arguments.out:
            arguments.out.write_text(text, encoding="utf-8")
    else:
        _go_on(project, begin(project, target, arguments))


def _refuse_begin_flags(arguments: argparse.Namespace) -> None:
    flags = ("--clone", "--commit", "--without-wheels", "--drop-contained", "--dry-run", "--out")
    if given := [f for f in flags if getattr(arguments, f[2:].replace("-", "_"))]:
        raise ToolError(
            "these belong to the beginning of a rebase",
            where=f"--{arguments.step}",
            found=", ".join(given),
            next_step="leave them out, or begin again: --abort, then --onto",
        )


def _show_target(target: Target) -> None:
    print(f"onto: vLLM {target.version} ({target.tag}, commit {target.commit})")
    for what, file in {"source": target.source, **target.wheels}.items():
        print(
            f"{what}: {file.filename}, sha256 {file.sha256}" if file else f"{what}: no base wheel"
        )
    for note in target.notes:
        print(f"note: {note}")


def begin(project: Project, target: Target, arguments: argparse.Namespace) -> State:
    """Set up the replay: the target's tree, the old commits beside it, the new pin and series."""
    missing = [variant for variant, file in target.wheels.items() if file is None]
    if missing and not arguments.without_wheels:
        raise ToolError(
            f"there is no base wheel of vLLM {target.version} to lay the series over",
            where=f"upstream.toml, wheel.{', wheel.'.join(missing)}",
            expected="one on the package index for each variant",
            found=f"none for {', '.join(missing)}",
            next_step="rebase without wheels of that variant: --without-wheels",
        )
    series = read_series(project.series_file)
    with staging(place(project)) as stage:
        git = set_up(project, target, arguments.clone, series, stage)
        state = State(
            before=project.pin.version,
            onto=target.version,
            fingerprint=state_of(project),
            patches=[patch.name for patch in series],
            head=git.text("rev-parse", BASE_REF),
            drop_contained=arguments.drop_contained,
        )
        save(stage, state)
        shutil.rmtree(place(project), ignore_errors=True)
        stage.rename(place(project))
    return state


def _go_on(project: Project, state: State) -> None:
    if state.phase == REPLAYING:
        replay(project, state, tell)
    done = finish(project, state, tell)
    print(done.range_diff, end="")
    print(f"rebased: {done.patches} patches from vLLM {state.before} onto {state.onto}")
    for name, why in state.left_out.items():
        print(f"left out: {name} ({why})")
    if project.submodule and done.commit == UNKNOWN:
        print(f"note: the commit of the submodule {project.submodule.name}/ was left as it was")
    if done.kept_tree:
        print(f"note: the old build tree has branches or stashes, kept in {done.kept_tree}")
    print("next: make lock && make install && make test; then commit what changed")


def _leave_out(project: Project, state: State, *, contained: bool) -> None:
    """Leave the patch that the rebase stopped at out of the series."""
    verb = "drop" if contained else "skip"
    git = Git(place(project) / "vllm")
    if state.stop:
        catch_up(state, git)
    if state.stop is None or (contained and state.stop != CONTAINED):
        where = f"at {state.patches[state.done]}, which conflicts" if state.stop else "at no patch"
        raise ToolError(
            f"there is nothing to {verb}",
            where=place(project),
            expected="a stop at a patch" + (" that the release contains" if contained else ""),
            found=where,
            next_step=f"{COMMAND} " + ("--skip leaves it out" if state.stop else "--continue"),
        )
    forget_pick(git, state.head)
    leave_out(state)
    save(place(project), state)


def abort(project: Project, state: State) -> None:
    """Forget the rebase; pin, series and build tree are as before it."""
    if state.phase == INSTALLING:
        undo(project, state)
    shutil.rmtree(place(project))


def try_all(project: Project, target: Target, clone: Path | None) -> list[Trial]:
    """Try every patch, in a place that is gone afterwards."""
    series = read_series(project.series_file)
    trials: list[Trial] = []
    with staging(place(project)) as stage:
        git = set_up(project, target, clone, series, stage)
        for patch, commit in zip(series, old_commits(git), strict=True):
            trials.append(attempt(git, patch.name, commit))
            tell(f"[{len(trials):2}/{len(series)}] {patch.name}: {trials[-1].verdict}")
    return trials
