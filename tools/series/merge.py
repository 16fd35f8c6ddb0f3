# SPDX-License-Identifier: Apache-2.0
"""The commits of the series, merged one by one onto another base; a person resolves conflicts.

The commits above the base and the patches left out tell how far it came: an interruption, or a
commit that a person makes with plain git, loses nothing.
"""

from collections.abc import Sequence
from typing import NamedTuple

from tools.common.cli import table, tell
from tools.common.errors import ToolError
from tools.common.git import Git
from tools.series.target import Target
from tools.series.tree import BASE_REF

COMMAND = "python -m tools series rebase"
# The series on its old base, beside the new base.
OLD_BASE, OLD_APPLIED = "refs/re/old/base", "refs/re/old/applied"
CLEAN, CONFLICT, CONTAINED = "clean", "conflict", "contained"
_LEFT_OUT = "re.leftout"  # in the repository's configuration: patches, each with the reason


def old_commits(git: Git) -> list[str]:
    """The commits of the patches on the old base, in order."""
    return git.commits(f"{OLD_BASE}..{OLD_APPLIED}")


def left_out(git: Git) -> list[str]:
    """Patches that were left out so far, each with the reason."""
    return git.text("config", "--get-all", _LEFT_OUT, accept=(0, 1)).splitlines()


def count_done(git: Git) -> int:
    """How many patches are committed or left out."""
    return len(git.commits(f"{BASE_REF}..HEAD")) + len(left_out(git))


def pick(git: Git, commit: str, *options: str) -> tuple[str, list[str]]:
    """Merge a commit into HEAD: CLEAN, CONFLICT or CONTAINED, and git's words on each conflict.

    CONTAINED: nothing is left to commit, because HEAD has the change already.
    """
    # diff3 shows the old release's lines too.
    words = ("-c", "merge.conflictStyle=diff3", "cherry-pick", *options, commit)
    done = git.run(*words, accept=(0, 1))
    if done.returncode == 0:
        return CLEAN, []
    said = done.stdout.decode(errors="replace").splitlines()
    found = [line.removeprefix("CONFLICT ") for line in said if line.startswith("CONFLICT ")]
    return CONFLICT if git.differs("--cached", "HEAD") else CONTAINED, found


def discard(git: Git) -> None:
    """Leave nothing uncommitted, and nothing of an unfinished cherry-pick."""
    git.run("cherry-pick", "--quit")
    git.run("reset", "--quiet", "--hard")
    git.run("clean", "--quiet", "--force", "-d")


def leave_out(git: Git, name: str, why: str) -> None:
    discard(git)
    git.run("config", "--add", _LEFT_OUT, f"{name} ({why})")


def merge_all(git: Git, names: Sequence[str], release: str, drop_contained: bool) -> None:
    """Merge the patches that are left onto ``release``, or stop at one and say what to do.

    ``names`` are those of all patches. ``drop_contained``: leave out those that the release
    contains, instead of stopping.
    """
    commits = old_commits(git)
    for number in range(count_done(git), len(commits)):
        name = names[number]
        discard(git)  # what an interruption left
        verdict, conflicts = pick(git, commits[number])
        if verdict == CONTAINED and drop_contained:
            leave_out(git, name, f"{release} contains it")
        elif verdict != CLEAN:
            what, step = f"a patch conflicts with {release}", "edit them (git add what is new)"
            if verdict == CONTAINED:
                what, step = f"{release} contains a patch already", "change something"
            found = f"files that cannot be merged: {len(conflicts)}" if conflicts else None
            step = f"{step} in {git.path}, then: {COMMAND} --continue"
            conflicts.append(f"to leave the patch out: {COMMAND} --skip")
            conflicts.append(f"to leave everything as it was: {COMMAND} --abort")
            where = f"{name}, {number + 1} of {len(names)}"
            raise ToolError(what, where, found=found, next_step=step, details=conflicts)
        tell(f"[{number + 1:2}/{len(commits)}] {name}: {verdict}")


def commit_resolution(git: Git) -> None:
    """Commit what a person made of the patch that the rebase stopped at, unless they did."""
    picking = git.commit_id("CHERRY_PICK_HEAD")
    if picking is None:
        git.refuse_dirt("there are changes beside a commit that was made already")
        return
    said = git.text("diff", "--check", "HEAD", accept=(0, 2)).splitlines()
    if marked := [line for line in said if line.endswith("leftover conflict marker")]:
        step = f"edit these files, then: {COMMAND} --continue"
        raise ToolError("conflict markers are left", git.path, next_step=step, details=marked)
    if untracked := [row[3:] for row in git.dirt() if row.startswith("??")]:
        what = "there are files that git does not track"
        step = f"git -C {git.path} add (or delete) them, then: {COMMAND} --continue"
        raise ToolError(what, git.path, next_step=step, details=untracked)
    git.run("add", "--update", ".")
    if not git.differs("--cached", "HEAD"):
        step = f"leave it out: {COMMAND} --skip; or change something, then: --continue"
        where = f"{git.path}, {git.subject(picking)}"
        raise ToolError("nothing is left of a patch", where, next_step=step)
    git.run("commit", "--quiet", "--cleanup=verbatim", "-C", picking)  # message, author, date


class Trial(NamedTuple):
    """What happens to a patch when those before it are resolved in their own favour."""

    name: str
    verdict: str  # CLEAN, CONTAINED or CONFLICT
    conflicts: list[str]


def attempt(git: Git, name: str, commit: str) -> Trial:
    """Try one patch on HEAD; a conflict is resolved in favour of the patch for those after it."""
    trial = Trial(name, *pick(git, commit))
    if trial.verdict == CONFLICT:
        discard(git)
        verdict, _ = pick(git, commit, "-X", "theirs")
        if verdict == CONFLICT:  # a file that one side removed
            for path in git.unmerged():
                gone = git.read(commit, path) is None
                git.run(*(("rm", "-qf") if gone else ("checkout", commit)), "--", path)
            if git.differs("--cached", "HEAD"):
                git.run("commit", "--quiet", "-C", commit)
    discard(git)
    return trial


def render_trials(trials: Sequence[Trial], target: Target, before: str) -> str:
    """The trials as Markdown: a row for each patch that does not simply apply."""
    verdicts = [trial.verdict for trial in trials]
    clean, conflict, contained = map(verdicts.count, (CLEAN, CONFLICT, CONTAINED))
    rows = [(f"`{n}`", verdict, "<br>".join(c)) for n, verdict, c in trials if verdict != CLEAN]
    cells = "\n".join(table(("Patch", "Verdict", "Where"), rows)) if rows else ""
    return (
        f"## From vLLM {before} onto {target.version}\n\n"
        f"{len(trials)} patches: {clean} apply, {conflict} conflict, {contained} are contained "
        f"already. Source: `{target.source.filename}`, sha256 `{target.source.sha256}`.\n\n{cells}"
    )
