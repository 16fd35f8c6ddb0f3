# SPDX-License-Identifier: Apache-2.0
"""The series on another release: replayed patch by patch aside, put in place as one act.

Everything happens below ``build/rebase``: ``vllm``, where the patches are replayed and conflicts
are resolved; ``new``, the pin and the series that come of it; ``before``, what they replace.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from tools.apply import apply_series
from tools.errors import ToolError
from tools.export import export_series
from tools.git import Git
from tools.pin import UNKNOWN, Project
from tools.series import Series, fingerprint, parse_series, read_series, write_series
from tools.source import BASE_REF, BRANCH, commit_base, identity
from tools.target import Target, check_clone_tree, render_pin, stage_tree
from tools.tree import (
    APPLIED_REF,
    open_tree,
    refuse_dirt,
    refuse_unaccounted,
    refuse_unfinished,
)

OLD_BASE = "refs/re/rebase/base"
OLD_APPLIED = "refs/re/rebase/applied"

REPLAYING, INSTALLING = "replaying", "installing"
CONFLICT, CONTAINED, EMPTY = "conflict", "contained", "empty"
COMMAND = "python -m tools series rebase"

# The two letters of git's status for a path that it could not merge. "There" is the release with
# the patches before.
_KINDS = {
    "DD": "neither there nor in the patch",
    "AU": "added there",
    "UD": "changed there, and the patch deletes it",
    "UA": "added by the patch",
    "DU": "not there, and the patch changes it",
    "AA": "both added it",
    "UU": "both changed it",
}

Tell = Callable[[str], None]


@dataclass(frozen=True)
class Clash:
    """A file that could not be merged."""

    path: str
    kind: str
    places: int  # with conflict markers; 0 where one side has no such file

    def __str__(self) -> str:
        number = {0: "", 1: ", 1 place"}.get(self.places, f", {self.places} places")
        return f"{self.path}: {self.kind}{number}"


@dataclass
class State:
    """How far a rebase came; kept in a file from one command to the next."""

    onto: str
    fingerprint: str  # of the pin and series that it began with
    queue: list[str]  # patches to come; the first is the one it stopped at
    total: int
    drop_contained: bool = False
    left_out: dict[str, str] = field(default_factory=dict)  # patch: why
    stop: str | None = None  # why it waits for a person
    head: str = ""  # the commit that the first of the queue goes onto
    files: list[str] = field(default_factory=list)  # that conflict
    phase: str = REPLAYING
    gitlink: str | None = None  # the submodule's commit before, where it is to be changed


@dataclass(frozen=True)
class Rebased:
    """What a finished rebase came to."""

    onto: str
    patches: int
    left_out: dict[str, str]
    range_diff: str
    kept_tree: Path | None
    commit: str  # of the submodule, now; UNKNOWN: it was left alone


@dataclass(frozen=True)
class Trial:
    """What a patch would meet, those before it taken as resolved in its favour."""

    name: str
    verdict: str  # "clean", CONTAINED or CONFLICT
    clashes: tuple[Clash, ...] = ()


def place(project: Project) -> Path:
    return project.root / "build" / "rebase"


def read_state(project: Project) -> State | None:
    """The rebase under way, or None."""
    path = place(project) / "state.json"
    return State(**json.loads(path.read_text())) if path.exists() else None


def _need_state(project: Project) -> State:
    state = read_state(project)
    if state is None:
        raise ToolError(
            "no rebase is under way",
            where=place(project),
            next_step=f"begin one: {COMMAND} --onto <version>",
        )
    return state


def _save(project: Project, state: State) -> None:
    path = place(project) / "state.json"
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(asdict(state), indent=2) + "\n")
    partial.replace(path)


def refuse_other_rebase(project: Project) -> None:
    if state := read_state(project):
        raise ToolError(
            "a rebase is under way already",
            where=place(project),
            found=f"onto vLLM {state.onto}, {_progress(state)}",
            next_step=f"{COMMAND} --continue, or give it up: {COMMAND} --abort",
        )


def _progress(state: State) -> str:
    done = state.total - len(state.queue)
    return f"{done} of {state.total} patches done" + (
        f", stopped at {state.queue[0]}" if state.queue else ""
    )


def missing_wheels(target: Target) -> list[str]:
    return [variant for variant, file in target.wheels.items() if file is None]


def begin(
    project: Project,
    target: Target,
    *,
    clone: Path | None = None,
    without_wheels: bool = False,
    drop_contained: bool = False,
) -> None:
    """Set up the replay: the target's tree, the old commits beside it, pin and series to be."""
    refuse_other_rebase(project)
    if (missing := missing_wheels(target)) and not without_wheels:
        raise ToolError(
            f"there is no base wheel of vLLM {target.version} to lay the series over",
            where=f"upstream.toml, wheel.{', wheel.'.join(missing)}",
            expected="one on the package index for each variant",
            found=f"none for {', '.join(missing)}",
            next_step="rebase all the same and build wheels from source: --without-wheels",
        )
    series = read_series(project.series_file)
    stage = _set_up(project, target, clone, series)
    state = State(
        onto=target.version,
        fingerprint=_state_of(project),
        queue=[patch.name for patch in series],
        total=len(series),
        drop_contained=drop_contained,
        head=Git(stage / "vllm").text("rev-parse", BASE_REF),
    )
    (stage / "state.json").write_text(json.dumps(asdict(state), indent=2) + "\n")
    shutil.rmtree(place(project), ignore_errors=True)
    stage.rename(place(project))


def _set_up(project: Project, target: Target, clone: Path | None, series: Series) -> Path:
    """A directory with everything that a replay needs; gone again where that fails."""
    apply_series(project, series, project.tree)  # refuses what would be lost
    build = place(project).parent
    stage = Path(tempfile.mkdtemp(prefix=".rebase-", dir=build))
    try:
        stage.chmod(0o755)
        tree = stage / "vllm"
        tree.mkdir()
        git, tree_id = stage_tree(project, target, tree)
        check_clone_tree(target, clone, tree_id)
        new = stage / "new"
        new.mkdir()
        pin = project.root / "upstream.toml"
        text = render_pin(pin.read_text(encoding="utf-8"), target, tree_id)
        (new / "upstream.toml").write_text(text, encoding="utf-8")
        shutil.copytree(project.series_file.parent, new / "patches", symlinks=True)
        shutil.copytree(project.series_file.parent, stage / "before", symlinks=True)
        shutil.copy2(pin, stage / "before-upstream.toml")
        commit_base(git, Project(new).pin)
        refs = [f"{BASE_REF}:{OLD_BASE}", f"{APPLIED_REF}:{OLD_APPLIED}"]
        git.run("fetch", "--quiet", "--no-tags", project.tree.resolve().as_uri(), *refs)
    except BaseException:
        shutil.rmtree(stage, ignore_errors=True)
        raise
    return stage


def _state_of(project: Project) -> str:
    """What the pin and the series are now; whoever edits them meanwhile is not overwritten."""
    pin = (project.root / "upstream.toml").read_text(encoding="utf-8")
    series = fingerprint(read_series(project.series_file), project.pin)
    return hashlib.sha256(f"{series} {pin}".encode()).hexdigest()


# --- replaying ----------------------------------------------------------------------------------


def _old_commits(project: Project, git: Git) -> dict[str, str]:
    """The commit of each patch, as it stood on the old base."""
    names = [patch.name for patch in read_series(project.series_file)]
    return dict(zip(names, git.commits(f"{OLD_BASE}..{OLD_APPLIED}"), strict=True))


def _dates(git: Git, commit: str) -> dict[str, str]:
    """The identity of a replayed commit: as the old one, so that ids are the same everywhere."""
    return identity(git.text("log", "-1", "--format=%aI", commit))


def _clashes(git: Git) -> tuple[Clash, ...]:
    found = []
    for row in git.run("status", "--porcelain", "-z").stdout.decode(errors="replace").split("\0"):
        if row[:2] in _KINDS:
            path = git.path / row[3:]
            lines = path.read_bytes().splitlines() if path.is_file() else []
            places = sum(line.startswith(b"<<<<<<< ") for line in lines)
            found.append(Clash(row[3:], _KINDS[row[:2]], places))
    return tuple(found)


def _pick(git: Git, commit: str, *options: str) -> str | None:
    """Merge one old commit into HEAD; None, or why it stopped.

    Where nothing is left to commit, HEAD has the change already.
    """
    done = git.run(
        "-c",
        "merge.conflictStyle=diff3",  # shows the old release's lines too
        "cherry-pick",
        *options,
        commit,
        env=_dates(git, commit),
        accept=(0, 1, 128),
    )
    if done.returncode == 0:
        return None
    if _clashes(git):
        return CONFLICT
    if git.run("diff", "--cached", "--quiet", "HEAD", accept=(0, 1)).returncode == 0:
        _give_up_pick(git, "HEAD")
        return CONTAINED
    raise ToolError(
        "git could not replay a patch",
        where=git.oneline(commit),
        details=(done.stdout + done.stderr).decode(errors="replace").splitlines(),
    )


def _give_up_pick(git: Git, head: str) -> None:
    git.run("cherry-pick", "--quit")
    git.run("reset", "--quiet", "--hard", head)


def _commit(git: Git, commit: str) -> None:
    """Commit what is staged with the message, author and dates of the old commit."""
    git.run(
        "commit", "--quiet", "--cleanup=verbatim", "-C", commit, env=_dates(git, commit)
    )  # without hooks: core.hooksPath
    git.run("cherry-pick", "--quit")


def go_on(project: Project, tell: Tell) -> Rebased:
    """Replay what is left and put the result in place, or stop and say what to do."""
    state = _need_state(project)
    git = Git(place(project) / "vllm")
    if state.phase == REPLAYING:
        _refuse_changes(project, state)
        _resolve(project, state, git)
        _replay(project, state, git, tell)
    return _finish(project, state, tell)


def _replay(project: Project, state: State, git: Git, tell: Tell) -> None:
    commits = _old_commits(project, git)
    if state.queue:
        _give_up_pick(git, state.head)  # what an interruption left half done, if anything
    while state.queue:
        name = state.queue[0]
        number = f"[{state.total - len(state.queue) + 1:2}/{state.total}] {name}"
        stop = _pick(git, commits[name])
        if stop == CONTAINED and state.drop_contained:
            state.left_out[name] = f"vLLM {state.onto} contains it"
            tell(f"{number}: dropped, the release contains it")
        elif stop:
            clashes = _clashes(git)
            state.stop = stop
            state.files = [clash.path for clash in clashes]
            _save(project, state)
            raise _stopped(state, git, clashes)
        else:
            tell(f"{number}: applied")
        state.queue.pop(0)
        state.head = git.text("rev-parse", "HEAD")
        _save(project, state)


def _stopped(state: State, git: Git, clashes: Sequence[Clash] = ()) -> ToolError:
    name = state.queue[0]
    where = f"{name}, {state.total - len(state.queue) + 1} of {state.total}"
    undo = f"to leave everything as it was: {COMMAND} --abort"
    if state.stop == CONTAINED:
        return ToolError(
            f"vLLM {state.onto} contains a patch already",
            where=where,
            next_step=f"drop it from the series: {COMMAND} --drop",
            details=[undo],
        )
    if state.stop == EMPTY:
        return ToolError(
            "nothing is left of a patch after its conflict was resolved",
            where=where,
            next_step=f"leave it out of the series: {COMMAND} --skip",
            details=[f"or change something in {git.path}, then: {COMMAND} --continue", undo],
        )
    return ToolError(
        f"a patch conflicts with vLLM {state.onto}",
        where=where,
        found=f"files that cannot be merged: {len(clashes)}, in {git.path}",
        next_step=f"edit them there (git add what is new), then: {COMMAND} --continue",
        details=[*map(str, clashes), f"to leave the patch out: {COMMAND} --skip", undo],
    )


def _refuse_changes(project: Project, state: State) -> None:
    if _state_of(project) != state.fingerprint:
        raise ToolError(
            "the pin or the series changed since the rebase began; nothing is overwritten",
            where=project.root,
            expected="upstream.toml and patches/ as they were",
            next_step=f"put them back (git restore), or begin again: {COMMAND} --abort",
        )


def _resolve(project: Project, state: State, git: Git) -> None:
    """Take up what a person made of the conflict that the rebase stopped at."""
    if state.stop is None:
        return
    if state.stop == CONTAINED:
        raise _stopped(state, git)
    marked = [name for name in state.files if _has_markers(git.path / name)]
    if marked:
        raise ToolError(
            "conflict markers are left",
            where=git.path,
            expected="no line that begins with <<<<<<< or >>>>>>>",
            found=", ".join(marked),
            next_step=f"edit these files, then: {COMMAND} --continue",
        )
    untracked = [row[3:] for row in git.dirt() if row.startswith("??")]
    if untracked:
        raise ToolError(
            "files that no commit would hold",
            where=git.path,
            found=", ".join(untracked),
            next_step=f"git -C {git.path} add (or delete) them, then: {COMMAND} --continue",
        )
    name = state.queue[0]
    git.run("add", "--update", ".")
    if git.run("diff", "--cached", "--quiet", "HEAD", accept=(0, 1)).returncode:
        if git.commit_id("HEAD") != state.head:
            raise ToolError(
                "changes beside a commit that was made already",
                where=git.path,
                found=git.oneline("HEAD"),
                next_step=f"git -C {git.path} commit --amend --no-edit, then: {COMMAND} --continue",
            )
        _commit(git, _old_commits(project, git)[name])
    elif git.commit_id("HEAD") == state.head:
        state.stop = EMPTY
        _save(project, state)
        raise _stopped(state, git)
    state.queue.pop(0)
    state.stop, state.files, state.head = None, [], git.text("rev-parse", "HEAD")
    _save(project, state)


def _has_markers(path: Path) -> bool:
    if not path.is_file():
        return False
    return any(
        line.startswith((b"<<<<<<< ", b">>>>>>> ")) for line in path.read_bytes().split(b"\n")
    )


def leave_out(project: Project, *, contained: bool) -> None:
    """Take the patch that the rebase stopped at out of the series."""
    state = _need_state(project)
    verb = "--drop" if contained else "--skip"
    if state.stop is None or (contained and state.stop != CONTAINED):
        where = f"at {state.queue[0]}, which conflicts" if state.stop else "at no patch"
        raise ToolError(
            f"there is nothing to {verb[2:]}",
            where=place(project),
            expected="a stop at a patch" + (" that the release contains" if contained else ""),
            found=where,
            next_step=f"{COMMAND} " + ("--skip leaves it out" if state.stop else "--continue"),
        )
    git = Git(place(project) / "vllm")
    _give_up_pick(git, state.head)
    git.run("clean", "--quiet", "--force", "-d")
    state.left_out[state.queue.pop(0)] = (
        f"vLLM {state.onto} contains it" if state.stop == CONTAINED else "skipped"
    )
    state.stop, state.files = None, []
    _save(project, state)


def abort(project: Project) -> State:
    """Forget the rebase; pin, series and build tree are as before it."""
    state = _need_state(project)
    if state.phase == INSTALLING:
        _restore(project, state)
    shutil.rmtree(place(project))
    return state


# --- trying -------------------------------------------------------------------------------------


def attempt(project: Project, target: Target, clone: Path | None, tell: Tell) -> list[Trial]:
    """Try every patch, in a place that is gone afterwards; conflicts go to the patch's side.

    So each patch is judged with those before it taken as resolved.
    """
    series = read_series(project.series_file)
    stage = _set_up(project, target, clone, series)
    try:
        git = Git(stage / "vllm")
        trials: list[Trial] = []
        for name, commit in _old_commits(project, git).items():
            trial = _try(git, name, commit)
            tell(f"[{len(trials) + 1:2}/{len(series)}] {name}: {trial.verdict}")
            trials.append(trial)
    finally:
        shutil.rmtree(stage, ignore_errors=True)
    return trials


def _try(git: Git, name: str, commit: str) -> Trial:
    stop = _pick(git, commit)
    if stop != CONFLICT:
        return Trial(name, stop or "clean")
    clashes = _clashes(git)
    _give_up_pick(git, "HEAD")
    if _pick(git, commit, "-X", "theirs") == CONFLICT:
        for clash in _clashes(git):
            has = clash.path in git.files(commit, clash.path)
            if has:
                git.run("checkout", commit, "--", clash.path)
            else:
                git.run("rm", "--quiet", "--force", "--", clash.path)
        if git.run("diff", "--cached", "--quiet", "HEAD", accept=(0, 1)).returncode:
            _commit(git, commit)
        else:
            _give_up_pick(git, "HEAD")
    return Trial(name, CONFLICT, clashes)


def render_trials(trials: Sequence[Trial], target: Target, before: str) -> str:
    """The trials as Markdown: a row for each patch that does not simply apply."""
    counts = {
        verdict: sum(t.verdict == verdict for t in trials)
        for verdict in ("clean", CONFLICT, CONTAINED)
    }
    lines = [
        f"## From vLLM {before} onto {target.version}",
        "",
        f"{len(trials)} patches: {counts['clean']} apply, {counts[CONFLICT]} conflict, "
        f"{counts[CONTAINED]} are contained already. Source: `{target.source.filename}`, sha256 "
        f"`{target.source.sha256}`.",
        "",
    ]
    if counts["clean"] != len(trials):
        lines += ["| Patch | Verdict | Where |", "| --- | --- | --- |"]
        for trial in trials:
            if trial.verdict != "clean":
                where = "<br>".join(f"`{c.path}`{str(c)[len(c.path) :]}" for c in trial.clashes)
                lines.append(f"| `{trial.name}` | {trial.verdict} | {where} |")
        lines.append("")
    return "\n".join(lines)


# --- putting in place ---------------------------------------------------------------------------


def _finish(project: Project, state: State, tell: Tell) -> Rebased:
    stage = place(project)
    new = Project(stage / "new")
    if state.phase == REPLAYING:
        kept = [p for p in read_series(project.series_file) if p.name not in state.left_out]
        if not kept:
            raise ToolError(
                "no patch is left of the series",
                where=stage,
                next_step=f"leave everything as it was: {COMMAND} --abort",
            )
        tell("writing the patches, and proving that they give back the commits")
        write_series(new.series_file, Series(tuple(kept)), list(state.left_out))
        try:
            export_series(new, new.series_file, stage / "vllm")
        except ToolError as error:
            raise ToolError(
                "the result cannot be a series yet; nothing was replaced",
                where=stage / "vllm",
                next_step=f"mend its commits (git rebase --interactive {BASE_REF}), then: "
                f"{COMMAND} --continue",
                details=str(error).splitlines(),
            ) from error
        apply_series(new, read_series(new.series_file), stage / "vllm")
        _refuse_busy_tree(project)
        state.phase, state.gitlink = INSTALLING, _read_gitlink(project)
        _save(project, state)
    before = project.pin.version
    try:
        _install(project, new, state)
    except BaseException:
        _restore(project, state)
        raise
    git = Git(project.tree)
    range_diff = git.run(
        "-c",
        "core.abbrev=12",
        "range-diff",
        "--no-color",
        f"{OLD_BASE}..{OLD_APPLIED}",
        f"{BASE_REF}..{APPLIED_REF}",
    ).stdout.decode(errors="replace")
    for ref in (OLD_BASE, OLD_APPLIED):
        git.run("update-ref", "-d", ref)
    kept_tree = _settle_old_tree(project, before)
    shutil.rmtree(stage)
    return Rebased(
        state.onto,
        len(read_series(project.series_file)),
        state.left_out,
        range_diff,
        kept_tree,
        new.pin.commit if state.gitlink else UNKNOWN,
    )


def _refuse_busy_tree(project: Project) -> None:
    """Refuse while the old build tree holds what only it has."""
    if project.tree.exists():
        git = open_tree(project.tree, project.pin)
        refuse_unfinished(git)
        refuse_dirt(git)
        refuse_unaccounted(git)


def _install(project: Project, new: Project, state: State) -> None:
    """Put pin, series and build tree in place; what an earlier attempt did is done again."""
    stage = place(project)
    if state.gitlink and new.pin.commit != UNKNOWN:
        _write_gitlink(project, new.pin.commit)
    series = read_series(new.series_file)
    names = {patch.name for patch in series}
    removed = [
        n
        for n in parse_series((stage / "before" / "series").read_text(encoding="utf-8"))
        if n not in names
    ]
    write_series(project.series_file, series, removed)
    _copy(new.root / "upstream.toml", project.root / "upstream.toml")
    if (stage / "vllm").exists():
        if project.tree.exists():
            project.tree.rename(stage / "old-tree")
        (stage / "vllm").rename(project.tree)


def _restore(project: Project, state: State) -> None:
    """Undo an installation, however far it came."""
    stage = place(project)
    if not (stage / "vllm").exists():
        project.tree.rename(stage / "vllm")
    if (stage / "old-tree").exists():
        (stage / "old-tree").rename(project.tree)
    _copy(stage / "before-upstream.toml", project.root / "upstream.toml")
    patches = project.series_file.parent
    fresh = stage / "before-again"
    shutil.rmtree(fresh, ignore_errors=True)
    shutil.copytree(stage / "before", fresh, symlinks=True)
    if patches.exists():
        shutil.rmtree(stage / "undone", ignore_errors=True)
        patches.rename(stage / "undone")
    fresh.rename(patches)
    if state.gitlink:
        _write_gitlink(project, state.gitlink)
    state.phase, state.gitlink = REPLAYING, None
    _save(project, state)


def _copy(source: Path, target: Path) -> None:
    """Replace a file as one act."""
    partial = target.with_name(f".{target.name}.partial")
    shutil.copy2(source, partial)
    partial.replace(target)


def _read_gitlink(project: Project) -> str | None:
    """The submodule's commit as the repository's index has it, if there is such a thing."""
    if not (project.root / ".git").exists():
        return None
    name = project.submodule.name
    rows = Git(project.root).text("ls-files", "--stage", "--", name).splitlines()
    return next((row.split()[1] for row in rows if row.startswith("160000 ")), None)


def _write_gitlink(project: Project, commit: str) -> None:
    name = project.submodule.name
    Git(project.root).run("update-index", "--cacheinfo", f"160000,{commit},{name}")


def _settle_old_tree(project: Project, version: str) -> Path | None:
    """Where the old build tree went, if it has branches or stashes that are nowhere else."""
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
