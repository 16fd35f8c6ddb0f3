# SPDX-License-Identifier: Apache-2.0
"""The series on another release: replayed in ``build/<line>/rebase``, put in place as one act."""

import argparse
import shutil
from pathlib import Path
from typing import NamedTuple

from tools.common.cli import add_flag, add_path, tell
from tools.common.errors import ToolError
from tools.common.files import staging
from tools.common.git import Git
from tools.common.pin import UNKNOWN, Project
from tools.series.apply import apply_series
from tools.series.export import export_series
from tools.series.replay import (
    COMMAND,
    CONTAINED,
    INSTALLING,
    OLD_APPLIED,
    OLD_BASE,
    REPLAYING,
    State,
    Trial,
    attempt,
    forget_pick,
    old_commits,
    place,
    read_state,
    render_trials,
    replay,
    result,
    set_up,
    state_of,
)
from tools.series.series import Series, read_series, write_series
from tools.series.target import Target, find_target
from tools.series.tree import APPLIED_REF, BASE_REF, BRANCH, open_settled, refuse_unaccounted

EXAMPLE = "--onto 1.2.3 --dry-run"
_STEPS = {
    "continue": "after the conflict was resolved",
    "skip": "leave the patch that conflicts out of the series",
    "drop": "drop the patch that the release contains already",
    "abort": "leave everything as it was before --onto",
}
_BEGIN = ("clone", "commit", "without_wheels", "drop_contained", "dry_run", "out")


def declare(parser: argparse.ArgumentParser) -> None:
    step = parser.add_mutually_exclusive_group(required=True)
    step.add_argument("--onto", metavar="VERSION_OR_REF", help="begin: a release, or a git ref")
    for flag, text in _STEPS.items():
        text = f"then: {text}"
        step.add_argument(f"--{flag}", dest="step", action="store_const", const=flag, help=text)
    begin = parser.add_argument_group("with --onto")
    add_path(begin, "--clone", "a clone of vLLM that has the ref or the tag")
    begin.add_argument("--commit", help="the commit of the release's tag, where no clone has it")
    add_flag(begin, "--without-wheels", "go on where a variant has no base wheel")
    add_flag(begin, "--drop-contained", "drop what the release contains, and go on")
    add_flag(begin, "--dry-run", "only show what would conflict; change nothing")
    add_path(begin, "--out", "with --dry-run: write the table there, Markdown")


def run(arguments: argparse.Namespace, project: Project) -> None:
    """Move the series to another vLLM: a release of the package index by version, or a git ref of
    a clone. Replays the patches in build/<line>/rebase by three-way merge (git cherry-pick) and
    stops at a conflict, or at a patch that the target contains. At the end patches/<line> (with the
    pin: source, base wheels) and the build tree are replaced, all or nothing, and a range-diff is
    shown. Never pushes and never commits here."""
    state = read_state(project)
    if arguments.onto is None:
        _next_step(project, state, arguments)
        return
    if state:
        raise ToolError(
            "a rebase is under way already",
            where=place(project),
            found=f"onto vLLM {state.onto}, {state}",
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


def _next_step(project: Project, state: State | None, arguments: argparse.Namespace) -> None:
    """--continue, --skip, --drop or --abort."""
    if given := [name for name in _BEGIN if getattr(arguments, name)]:
        raise ToolError(
            "these belong to the beginning of a rebase",
            where=f"--{arguments.step}",
            found=", ".join(f"--{name.replace('_', '-')}" for name in given),
            next_step="leave them out, or begin again: --abort, then --onto",
        )
    if state is None:
        step = f"begin one: {COMMAND} --onto <version>"
        raise ToolError("no rebase is under way", where=place(project), next_step=step)
    if arguments.step == "abort":
        abort(project, state)
        print(f"given up: the rebase onto vLLM {state.onto}; everything is as it was")
        return
    if arguments.step != "continue":
        _leave_out(project, state, arguments.step)
    _go_on(project, state)


def _show_target(target: Target) -> None:
    print(f"onto: vLLM {target.version} ({target.tag}, commit {target.commit})")
    for what, file in {"source": target.source, **target.wheels}.items():
        said = f"{file.filename}, sha256 {file.sha256}" if file else "no base wheel"
        print(f"{what}: {said}")
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
        state.save(stage)
        shutil.rmtree(place(project), ignore_errors=True)
        stage.rename(place(project))
    return state


def _go_on(project: Project, state: State) -> None:
    if state.phase == REPLAYING:
        replay(project, state)
    done = finish(project, state)
    print(done.range_diff)
    print(f"rebased: {done.patches} patches from vLLM {state.before} onto {state.onto}")
    for name, why in state.left_out.items():
        print(f"left out: {name} ({why})")
    if project.submodule and done.commit == UNKNOWN:
        print(f"note: the commit of the submodule {project.submodule.name}/ was left as it was")
    if done.kept_tree:
        print(f"note: the old build tree has branches or stashes, kept in {done.kept_tree}")
    print("next: make lock && make install && make test; then commit what changed")


def _leave_out(project: Project, state: State, verb: str) -> None:
    """``skip`` or ``drop`` the patch that the rebase stopped at."""
    git = Git(place(project) / "vllm")
    if state.stop:
        state.catch_up(git)
    if state.stop is None or (verb == "drop" and state.stop != CONTAINED):
        where = f"at {state.patches[state.done]}, which conflicts" if state.stop else "at no patch"
        expected = "a stop at a patch" + (" that the release contains" if verb == "drop" else "")
        raise ToolError(
            f"there is nothing to {verb}",
            where=place(project),
            expected=expected,
            found=where,
            next_step=f"{COMMAND} " + ("--skip leaves it out" if state.stop else "--continue"),
        )
    forget_pick(git, state.head)
    state.leave_out()
    state.save(place(project))


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


class Rebased(NamedTuple):
    """The result of a finished rebase."""

    patches: int
    range_diff: str
    kept_tree: Path | None
    commit: str  # of the submodule, now; UNKNOWN: it was left alone


def finish(project: Project, state: State) -> Rebased:
    """Put the result of the replay in place, completely or not at all."""
    stage = place(project)
    if state.phase == REPLAYING:
        tell("writing the patches, and proving that they give back the commits")
        _prove(project, state)
        _copy_beside(project)
        state.phase, state.gitlink = INSTALLING, _read_gitlink(project)
        state.save(stage)
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
    ranges = (f"{OLD_BASE}..{OLD_APPLIED}", f"{BASE_REF}..{APPLIED_REF}")
    range_diff = git.text("-c", "core.abbrev=12", "range-diff", "--no-color", *ranges)
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
    new = result(project, place(project))
    kept = [p for p in read_series(project.series_file) if p.name not in state.left_out]
    if not kept:
        step = f"leave everything as it was: {COMMAND} --abort"
        raise ToolError("no patch is left of the series", where=new.tree, next_step=step)
    write_series(new.series_file, Series(tuple(kept)), list(state.left_out))
    try:
        export_series(new)
    except ToolError as error:
        raise ToolError(
            "the result cannot be a series yet; nothing was replaced",
            where=new.tree,
            next_step=f"correct its commits (git rebase --interactive {BASE_REF}), then: "
            f"{COMMAND} --continue",
            details=str(error).splitlines(),
        ) from error
    apply_series(new, read_series(new.series_file))
    if project.tree.exists():  # it may hold what only it has
        refuse_unaccounted(open_settled(project))


def _swaps(project: Project) -> tuple[tuple[Path, Path, Path], ...]:
    """What is replaced: its place, the new one and the old one, all on one file system."""
    line, stage = project.patches, place(project)
    beside = (line, line.with_name(f".{line.name}-new"), line.with_name(f".{line.name}-old"))
    return beside, (project.tree, stage / "vllm", stage / "old-tree")


def _copy_beside(project: Project) -> None:
    """Put a copy of the new line beside the old one; build/ may be another disk."""
    _remove_leftovers(project)
    shutil.copytree(result(project, place(project)).patches, _swaps(project)[0][1])


def _remove_leftovers(project: Project) -> None:
    for path in _swaps(project)[0][1:]:
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
    state.save(place(project))
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
