# SPDX-License-Identifier: Apache-2.0
"""The patches of the series, merged onto another release by git's own sequencer.

This happens in the build tree, whose base is then the new release; refs keep the old state.
``build/<line>/rebase`` holds ``state.json``, and in ``new`` the pin and the series of the result.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import NamedTuple

from tools.common.cli import tell
from tools.common.errors import ToolError
from tools.common.files import write
from tools.common.git import Git
from tools.common.markdown import table
from tools.common.pin import Project
from tools.series.series import fingerprint, read_series
from tools.series.target import Target
from tools.series.tree import BASE_REF, OLD_APPLIED, OLD_BASE, discard

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


class Clash(NamedTuple):
    """A file that could not be merged."""

    path: str
    kind: str
    places: int  # with conflict markers; 0 where one side has no such file

    def __str__(self) -> str:
        number = {0: "", 1: ", 1 place"}.get(self.places, f", {self.places} places")
        return f"{self.path}: {self.kind}{number}"


@dataclass
class State:
    """A rebase under way, kept in a file from one command to the next.

    The commits above the base and ``left_out`` tell how far it came: an interruption loses nothing.
    """

    before: str  # vLLM's version
    onto: str
    fingerprint: str  # of the pin and series that it began with
    base: str  # the new base commit
    patches: list[str]
    record: list[str]  # of the build tree before
    drop_contained: bool = False
    left_out: dict[str, str] = field(default_factory=dict)  # patch: why
    done: int = 0  # patches that are committed or left out
    stop: str | None = None  # why it waits for a person: CONFLICT or CONTAINED

    def __str__(self) -> str:
        at = f", stopped at {self.patches[self.done]}" if self.done < len(self.patches) else ""
        return f"{self.done} of {len(self.patches)} patches done{at}"

    def save(self, stage: Path) -> None:
        write(stage / "state.json", json.dumps(asdict(self), indent=2) + "\n")

    def leave_out(self) -> None:
        """Leave the patch that the rebase stopped at out of the series."""
        why = f"vLLM {self.onto} contains it" if self.stop == CONTAINED else "skipped"
        self.left_out[self.patches[self.done]] = why
        self.done += 1
        self.stop = None

    def catch_up(self, git: Git) -> None:
        """Count the commits, also those that a person made with plain git since the stop."""
        done = len(git.commits(f"{BASE_REF}..HEAD")) + len(self.left_out)
        if done != self.done:
            self.done, self.stop = done, CONFLICT if git.commit_id("CHERRY_PICK_HEAD") else None


def place(project: Project) -> Path:
    return project.build / "rebase"


def read_state(project: Project) -> State | None:
    """The rebase under way, or None."""
    path = place(project) / "state.json"
    return State(**json.loads(path.read_text())) if path.exists() else None


def state_of(project: Project) -> str:
    """A digest of the pin and the series, to notice edits made during a rebase."""
    series = fingerprint(read_series(project.series_file), project.pin)
    return hashlib.sha256(f"{series} {project.pin_file.read_text()}".encode()).hexdigest()


def old_commits(git: Git) -> list[str]:
    """The commits of the patches on the old base, in order."""
    return git.commits(f"{OLD_BASE}..{OLD_APPLIED}")


def clashes(git: Git) -> tuple[Clash, ...]:
    found = []
    for row in git.text("status", "--porcelain", "-z").split("\0"):
        if row[:2] in _KINDS:
            path = git.path / row[3:]
            lines = path.read_bytes().splitlines() if path.is_file() else []
            places = sum(line.startswith(b"<<<<<<< ") for line in lines)
            found.append(Clash(row[3:], _KINDS[row[:2]], places))
    return tuple(found)


def pick(git: Git, commits: str, *options: str) -> str | None:
    """Merge a commit or a range into HEAD; None, or why git stopped at CHERRY_PICK_HEAD.

    CONTAINED: nothing is left to commit, because HEAD has the change already.
    """
    # diff3 shows the old release's lines too.
    words = ("-c", "merge.conflictStyle=diff3", "cherry-pick", *options, commits)
    done = git.run(*words, accept=(0, 1, 128))
    if done.returncode == 0:
        return None
    if clashes(git):
        return CONFLICT
    if git.commit_id("CHERRY_PICK_HEAD") and not git.differs("--cached", "HEAD"):
        return CONTAINED
    said = (done.stdout + done.stderr).decode(errors="replace").splitlines()
    raise ToolError("git could not replay a patch", where=git.path, details=said)


def replay(project: Project, state: State) -> None:
    """Replay the patches that are left, or stop and say what to do."""
    stage, git = place(project), Git(project.tree)
    if state_of(project) != state.fingerprint:
        raise ToolError(
            "the pin or the series changed since the rebase began; nothing is overwritten",
            where=project.patches,
            expected="upstream.toml and patches as they were",
            next_step=f"put them back (git restore), or begin again: {COMMAND} --abort",
        )
    _resolve(state, git)
    state.save(stage)
    commits = old_commits(git)
    while state.done < len(commits):
        discard(git)
        before = commits[state.done - 1] if state.done else OLD_BASE
        stop = pick(git, f"{before}..{OLD_APPLIED}")
        stopped_at = git.commit_id("CHERRY_PICK_HEAD") if stop else None
        reached = commits.index(stopped_at) if stopped_at else len(commits)
        for number in range(state.done, reached):
            tell(f"[{number + 1:2}/{len(commits)}] {state.patches[number]}: applied")
        state.done, state.stop = reached, stop
        if stop == CONTAINED and state.drop_contained:
            tell(f"[{reached + 1:2}/{len(commits)}] {state.patches[reached]}: dropped")
            state.leave_out()
        state.save(stage)
        if state.stop:
            raise _stopped(state, git, state.stop)


def _resolve(state: State, git: Git) -> None:
    """Commit a person's resolution of the conflict that the rebase stopped at."""
    stopped = state.stop
    state.catch_up(git)
    picking = git.commit_id("CHERRY_PICK_HEAD")
    if stopped and picking is None and git.differs("HEAD"):
        raise ToolError(
            "there are changes beside a commit that was made already",
            where=git.path,
            found=git.oneline("HEAD"),
            next_step=f"git -C {git.path} commit --amend --no-edit, then: {COMMAND} --continue",
        )
    if picking and state.stop:
        if state.stop == CONTAINED:
            raise _stopped(state, git, CONTAINED)
        _refuse_unresolved(git)
        git.run("add", "--update", ".")
        if not git.differs("--cached", "HEAD"):
            raise _stopped(state, git, EMPTY)
        git.run("commit", "--quiet", "--cleanup=verbatim", "-C", picking)  # message, author, date
        state.done += 1
    state.stop = None


def _refuse_unresolved(git: Git) -> None:
    marked = git.text("grep", "--name-only", "-E", "^(<<<<<<<|>>>>>>>) ", accept=(0, 1)).split("\n")
    changed = git.text("diff", "--name-only", "HEAD").split("\n")
    if found := [name for name in marked if name and name in changed]:
        raise ToolError(
            "conflict markers are left",
            where=git.path,
            expected="no line that begins with <<<<<<< or >>>>>>>",
            found=", ".join(found),
            next_step=f"edit these files, then: {COMMAND} --continue",
        )
    if untracked := [row[3:] for row in git.dirt() if row.startswith("??")]:
        raise ToolError(
            "there are files that git does not track",
            where=git.path,
            found=", ".join(untracked),
            next_step=f"git -C {git.path} add (or delete) them, then: {COMMAND} --continue",
        )


def _stopped(state: State, git: Git, why: str) -> ToolError:
    found = None
    if why == CONTAINED:
        what = f"vLLM {state.onto} contains a patch already"
        step, more = f"drop it from the series: {COMMAND} --drop", []
    elif why == EMPTY:
        what = "nothing is left of a patch after its conflict was resolved"
        step = f"leave it out of the series: {COMMAND} --skip"
        more = [f"or change something in {git.path}, then: {COMMAND} --continue"]
    else:
        files = clashes(git)
        what = f"a patch conflicts with vLLM {state.onto}"
        found = f"files that cannot be merged: {len(files)}, in {git.path}"
        step = f"edit them there (git add what is new), then: {COMMAND} --continue"
        more = [*map(str, files), f"to leave the patch out: {COMMAND} --skip"]
    undo = f"to leave everything as it was: {COMMAND} --abort"
    where = f"{state.patches[state.done]}, {state.done + 1} of {len(state.patches)}"
    return ToolError(what, where=where, found=found, next_step=step, details=[*more, undo])


# --- dry run ------------------------------------------------------------------------------------


class Trial(NamedTuple):
    """What happens to a patch when those before it are resolved in their own favour."""

    name: str
    verdict: str  # "clean", CONTAINED or CONFLICT
    clashes: tuple[Clash, ...] = ()


def attempt(git: Git, name: str, commit: str) -> Trial:
    """Try one patch on HEAD; a conflict is resolved in favour of the patch for those after it."""
    stop = pick(git, commit)
    if stop is None:
        return Trial(name, "clean")
    found = clashes(git)
    discard(git)
    if stop == CONFLICT and (again := pick(git, commit, "-X", "theirs")):
        for path in (clash.path for clash in clashes(git)):
            if path in git.files(commit, path):
                git.run("checkout", commit, "--", path)
            else:
                git.run("rm", "--quiet", "--force", "--", path)
        if again == CONFLICT and git.differs("--cached", "HEAD"):
            git.run("commit", "--quiet", "-C", commit)
        discard(git)
    return Trial(name, stop, found)


def render_trials(trials: Sequence[Trial], target: Target, before: str) -> str:
    """The trials as Markdown: a row for each patch that does not simply apply."""
    verdicts = [trial.verdict for trial in trials]
    clean, conflict, contained = map(verdicts.count, ("clean", CONFLICT, CONTAINED))
    lines = [
        f"## From vLLM {before} onto {target.version}",
        "",
        f"{len(trials)} patches: {clean} apply, {conflict} conflict, {contained} are contained "
        f"already. Source: `{target.source.filename}`, sha256 `{target.source.sha256}`.",
        "",
    ]
    if rows := [
        (f"`{name}`", verdict, "<br>".join(f"`{c.path}`{str(c)[len(c.path) :]}" for c in found))
        for name, verdict, found in trials
        if verdict != "clean"
    ]:
        lines += [*table(("Patch", "Verdict", "Where"), rows), ""]
    return "\n".join(lines)
