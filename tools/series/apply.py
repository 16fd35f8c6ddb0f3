# SPDX-License-Identifier: Apache-2.0
"""From patch files to commits."""

import argparse
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tools.common.cli import ToolError, add_flag, add_tree
from tools.common.files import staging
from tools.common.git import Git
from tools.common.pin import Project
from tools.series import tree
from tools.series.series import Patch, Series, read_series
from tools.series.tree import APPLIED_REF, BASE_REF


def declare(parser: argparse.ArgumentParser) -> None:
    add_tree(parser)
    add_flag(parser, "--pristine", "apply no patch at all")
    add_flag(parser, "--discard", "lose what the build tree has beyond the series")


def run(arguments: argparse.Namespace, project: Project) -> None:
    """Bring the build tree to the pinned release plus one commit per patch. The release is
    downloaded, from the index that PIP_INDEX_URL names, if it does not lie in build/downloads. A
    patch that does not fit exactly changes nothing. The commit ids are the same on every machine.
    Refuses over uncommitted changes, and over commits that the series cannot give back."""
    series = Series() if arguments.pristine else read_series(project.series_file)
    changed = apply_series(project, series, discard=arguments.discard)
    state = "applied" if changed else "nothing to do"
    print(f"{state}: {len(series)} patches on {project.pin.tag} in {project.tree}")
    print(f"commit: {Git(project.tree).commit_id(APPLIED_REF)}")


def am(git: Git, patch: Patch) -> str:
    """Make one commit of a patch on HEAD, or raise; returns the commit, whose message names the
    patch."""
    options = (
        "--keep-non-patch",  # only [PATCH] is cut off a subject: [Core] survives
        "--keep-cr",  # a patch is bytes
        "--no-scissors",  # a message may hold a scissors line
        "--no-3way",  # what does not fit is refused, not merged
        "--whitespace=error",  # nor does an added line end in blanks
        "--committer-date-is-author-date",  # the same commit id on every machine
    )
    try:
        git.run("am", "--quiet", *options, stdin=patch.mail, env=tree.identity())
    except ToolError as error:
        git.run("am", "--abort", accept=(0, 1, 128))
        what = "a patch does not apply; nothing was changed"
        step = "to solve it by hand: series apply --pristine; then, in the build tree, git am "
        step += "--3way --keep-non-patch with the patches in their order; then series export"
        raise ToolError(what, patch.name, next_step=step, details=error.details) from error
    return git.text("rev-parse", "HEAD")


@contextmanager
def scratch_worktree(git: Git, commit: str = BASE_REF, beside: Path | None = None) -> Iterator[Git]:
    """A second work tree on a commit, beside the first or another path; gone afterwards."""
    git.run("worktree", "prune")
    try:
        with staging(beside or git.path) as place:
            git.run("worktree", "add", "--quiet", "--detach", str(place), commit)
            yield Git(place)
    finally:
        git.run("worktree", "prune")


def apply_series(project: Project, series: Series, *, discard: bool = False) -> bool:
    """Bring the build tree to the base plus the series, completely or not at all; whether it
    was not there already."""
    if not project.tree.exists():
        with staging(project.tree) as place:
            tree.make_base(project, place)
            place.rename(project.tree)
    git = tree.open_tree(project) if discard else tree.open_settled(project)
    head, applied = git.commit_id("HEAD"), git.commit_id(APPLIED_REF)
    branch = git.text("symbolic-ref", "--quiet", "HEAD", accept=(0, 1))
    settled = branch == f"refs/heads/{tree.BRANCH}" and not git.dirt()
    record = tree.record(git, series, project.pin, applied or BASE_REF)
    if applied and settled and head == applied and tree.read_record(git) == record:
        return False
    if not discard and (lost := tree.unaccounted(git)):
        what = "the build tree has commits that the series does not account for"
        found, details = f"{len(lost)} commits that would be lost", [*map(git.log, lost)]
        step = "keep them: python -m tools series export; or lose them: --discard"
        raise ToolError(what, git.path, None, found, step, details)
    with scratch_worktree(git) as scratch:
        for patch in series:
            am(scratch, patch)
        commit = scratch.text("rev-parse", "HEAD")
    changed = applied is None or head != commit or not settled
    if changed:
        for name in ("rebase-merge", "rebase-apply"):
            shutil.rmtree(git.path / ".git" / name, ignore_errors=True)
        force = ["--force"] if discard else []
        git.run("checkout", "--quiet", *force, "-B", tree.BRANCH, commit)
        if discard:
            git.run("clean", "--quiet", "--force", "-d")
    git.run("update-ref", APPLIED_REF, "HEAD")
    tree.write_record(git, tree.record(git, series, project.pin))
    return changed
