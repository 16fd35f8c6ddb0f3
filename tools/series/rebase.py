# SPDX-License-Identifier: Apache-2.0
"""The series on another release: replayed in the build tree, put in place as one act."""

import argparse
import shutil
from pathlib import Path

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
    State,
    Trial,
    attempt,
    old_commits,
    place,
    read_state,
    render_trials,
    replay,
    state_of,
)
from tools.series.series import read_series, replacing_line, write_series
from tools.series.target import Target, find_target, open_clone, render_pin
from tools.series.tree import (
    APPLIED_REF,
    BASE_REF,
    OLD_APPLIED,
    OLD_BASE,
    Record,
    change_base,
    commit_base,
    discard,
    forget_old_base,
    read_record,
    restore_base,
    unpack_source,
)
from tools.source.download import fetch

EXAMPLE = "--onto 1.2.3 --dry-run"
_STEPS = {
    "continue": "after the conflict was resolved",
    "skip": "leave the patch that conflicts out of the series",
    "drop": "drop the patch that the release contains already",
    "abort": "leave everything as it was before --onto",
}
_BEGIN = ("clone", "commit", "without_wheels", "drop_contained", "dry_run")


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
    add_flag(begin, "--dry-run", "only show what would conflict, as Markdown; change nothing")


def run(arguments: argparse.Namespace, project: Project) -> None:
    """Move the series to another vLLM: a release of the package index by version, or a git ref of
    a clone. Replays the patches in the build tree by three-way merge (git cherry-pick) and stops at
    a conflict, or at a patch that the target contains. At the end patches/<line> is replaced, with
    the pin (source, base wheels), all or nothing, and a range-diff is shown. Never pushes and never
    commits here."""
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
    target = find_target(project, arguments.onto, arguments.clone, arguments.commit)
    _show_target(target)
    if target.source.sha256 == project.pin.source.sha256:
        print(f"nothing to do: the series stands on vLLM {target.version}")
    elif arguments.dry_run:
        trials = try_all(project, target, arguments.clone)
        print(render_trials(trials, target, project.pin.version))
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
    if arguments.step != "abort" and not project.tree.exists():
        what, step = "the build tree of the rebase is gone", f"begin again: {COMMAND} --abort"
        raise ToolError(what, where=project.tree, next_step=step)
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
    apply_series(project, series)  # refuses what would be lost
    git = Git(project.tree)
    with staging(place(project)) as stage:
        fresh = set_up(project, target, arguments.clone, stage)
        git.run("fetch", "--quiet", "--no-tags", fresh.path.as_uri(), "HEAD")
        state = State(
            before=project.pin.version,
            onto=target.version,
            fingerprint=state_of(project),
            base=git.text("rev-parse", "FETCH_HEAD"),
            patches=[patch.name for patch in series],
            record=list(read_record(git) or ()),
            drop_contained=arguments.drop_contained,
        )
        shutil.rmtree(fresh.path)
        state.save(stage)
        shutil.rmtree(place(project), ignore_errors=True)
        stage.rename(place(project))
    return state


def set_up(project: Project, target: Target, clone: Path | None, stage: Path) -> Git:
    """A repository in ``stage`` whose one commit is the target, and in ``new`` its pin."""
    path = stage / "vllm"
    path.mkdir()
    git, tree_id = unpack_source(fetch(target.source, project), target.archive_only, path)
    if clone and tree_id != (wanted := open_clone(clone).tree_id(target.commit)):
        raise ToolError(
            "the source archive does not hold the files of the tag",
            where=target.source.filename,
            expected=f"tree {wanted} of {target.tag} in {clone}",
            found=f"tree {tree_id}",
            next_step="add what the archive has beyond the tag to archive_only in upstream.toml",
        )
    new = _result(project, stage)
    shutil.copytree(project.patches, new.patches, symlinks=True)
    text = render_pin(project.pin_file.read_text(encoding="utf-8"), target, tree_id)
    new.pin_file.write_text(text, encoding="utf-8")
    commit_base(git, new.pin)
    return git


def _result(project: Project, stage: Path) -> Project:
    """The project as it will be: the new pin and series, in the stage."""
    return Project(stage / "new", project.line, tree_at=project.tree)


def _go_on(project: Project, state: State) -> None:
    git, new = Git(project.tree), _result(project, place(project))
    if project.pin != new.pin:
        if git.commit_id(OLD_BASE) is None:
            change_base(git, state.base)
        replay(project, state)
        tell("writing the patches, and proving that they give back the commits")
        _prove(project, new, state)
        with replacing_line(project.patches) as stage:
            shutil.copytree(new.patches, stage, symlinks=True, dirs_exist_ok=True)
    # The new series is in place: what is left can be done again.
    _move_submodule(project, new)
    if git.commit_id(OLD_BASE):
        ranges = (f"{OLD_BASE}..{OLD_APPLIED}", f"{BASE_REF}..{APPLIED_REF}")
        print(git.text("-c", "core.abbrev=12", "range-diff", "--no-color", *ranges))
        forget_old_base(git)
    count = len(read_series(project.series_file))
    print(f"rebased: {count} patches from vLLM {state.before} onto {state.onto}")
    for name, why in state.left_out.items():
        print(f"left out: {name} ({why})")
    print("next: make lock && make install && make test; then commit what changed")
    shutil.rmtree(place(project))


def _leave_out(project: Project, state: State, verb: str) -> None:
    """``skip`` or ``drop`` the patch that the rebase stopped at."""
    git = Git(project.tree)
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
    discard(git)
    state.leave_out()
    state.save(place(project))


def abort(project: Project, state: State) -> None:
    """Forget the rebase; pin, series and build tree are as before it."""
    git = Git(project.tree)
    if project.pin == _result(project, place(project)).pin:
        raise ToolError(
            "the rebase is finished: the new series is in place",
            where=project.patches,
            next_step=f"{COMMAND} --continue, then git restore what you want back",
        )
    if project.tree.exists() and git.commit_id(OLD_BASE):
        restore_base(git, Record(*state.record) if state.record else None)
    shutil.rmtree(place(project))


def try_all(project: Project, target: Target, clone: Path | None) -> list[Trial]:
    """Try every patch, in a place that is gone afterwards."""
    series = read_series(project.series_file)
    apply_series(project, series)
    refs = [f"{BASE_REF}:{OLD_BASE}", f"{APPLIED_REF}:{OLD_APPLIED}"]
    trials: list[Trial] = []
    with staging(place(project)) as stage:
        git = set_up(project, target, clone, stage)
        git.run("fetch", "--quiet", "--no-tags", project.tree.resolve().as_uri(), *refs)
        for patch, commit in zip(series, old_commits(git), strict=True):
            trials.append(attempt(git, patch.name, commit))
            tell(f"[{len(trials):2}/{len(series)}] {patch.name}: {trials[-1].verdict}")
    return trials


def _prove(project: Project, new: Project, state: State) -> None:
    """Export the replayed commits and apply them again; refuse before anything is replaced."""
    kept = [p for p in read_series(project.series_file) if p.name not in state.left_out]
    if not kept:
        step = f"leave everything as it was: {COMMAND} --abort"
        raise ToolError("no patch is left of the series", where=new.tree, next_step=step)
    write_series(new.series_file, tuple(kept), list(state.left_out))
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


def _move_submodule(project: Project, new: Project) -> None:
    """Set the submodule's commit in the repository's index to that of the new pin."""
    name, commit = new.pin.submodule, new.pin.commit
    if name is None or not (project.root / ".git").exists():
        return
    git = Git(project.root)
    if not git.text("ls-files", "--stage", "--", name).startswith("160000 "):
        return
    if commit == UNKNOWN:
        print(f"note: the commit of the submodule {name}/ was left as it was")
    else:
        git.run("update-index", "--cacheinfo", f"160000,{commit},{name}")
