# SPDX-License-Identifier: Apache-2.0
"""From patch files to commits."""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tools.common.cli import add_downloads, add_flag, add_series, add_tree, series_of, tree_of
from tools.common.errors import FailedCommand, ToolError
from tools.common.files import staging
from tools.common.git import Git
from tools.common.pin import Pin, Project
from tools.series.base import BASE_REF, BRANCH, identity, make_base
from tools.series.patch import Patch, check_paths
from tools.series.series import Series, fingerprint, read_series
from tools.series.tree import (
    APPLIED_REF,
    Record,
    open_tree,
    read_record,
    refuse_dirt,
    refuse_unaccounted,
    refuse_unfinished,
    write_record,
)
from tools.source.fetch import fetch_source, submodule

EXAMPLE = "--pristine --tree build/v0.20.2/pristine/vllm"


def declare(parser: argparse.ArgumentParser) -> None:
    add_series(parser)
    add_tree(parser)
    add_downloads(parser)
    add_flag(parser, "--pristine", "apply no patch at all")
    parser.add_argument("--before", metavar="PATCH", help="stop before this patch")
    add_flag(
        parser,
        "--refresh",
        "take patches that moved or were edited by hand (never with fuzz); then export",
    )
    add_flag(parser, "--discard", "lose what the build tree has beyond the series")


def run(arguments: argparse.Namespace, project: Project) -> None:
    """Bring the build tree to the pinned release plus one commit per patch. All or nothing:
    a patch that does not fit exactly changes nothing. The commit ids are the same on every
    machine. Refuses over uncommitted changes, and over commits that the series cannot give back."""
    series = Series() if arguments.pristine else read_series(series_of(arguments, project))
    if arguments.before:
        series = series.before(arguments.before)
    tree = tree_of(arguments, project)
    if not tree.exists():
        print(f"source: {fetch_source(project)}")
    done = apply_series(project, series, tree, discard=arguments.discard, refresh=arguments.refresh)
    state = "applied" if done.changed else "nothing to do"
    print(f"{state}: {done.patches} patches on {project.pin.git_tag} in {tree}")
    print(f"commit: {done.commit}")


@dataclass(frozen=True)
class Applied:
    """The result of an apply."""

    commit: str
    patches: int
    changed: bool


def am(git: Git, patch: Patch, *, refresh: bool = False) -> str:
    """Make one commit of a patch on HEAD, or raise; returns the commit.

    Unless ``refresh``, the diff must be about exactly these files: the blobs before and after are
    those that its ``index`` lines name. So a patch that moved or was edited by hand is refused.
    """
    if problems := check_paths(patch):
        raise problems[0]
    try:
        git.run(
            "am",
            "--quiet",
            "--keep-non-patch",  # only [PATCH] is cut off a subject: [Core] survives
            "--keep-cr",  # a patch is bytes
            "--no-scissors",  # a message may hold a scissors line
            "--no-3way",  # what does not fit is refused, not merged
            "--committer-date-is-author-date",  # the same commit id on every machine
            "--no-gpg-sign",
            stdin=patch.data,
            env=identity(),
        )
    except FailedCommand as error:
        git.run("am", "--abort", accept=(0, 1, 128))
        raise ToolError(
            "a patch does not apply; nothing was changed",
            where=patch.name,
            expected="every hunk to fit without fuzz",
            next_step=f"to solve it by hand: series apply --before {patch.name}, then in the "
            f"build tree git am --3way --keep-non-patch",
            details=error.details,
        ) from error
    commit = git.commit_id("HEAD")
    assert commit is not None
    if not refresh:
        _refuse_other_blobs(git, patch, commit)
    return commit


def _refuse_other_blobs(git: Git, patch: Patch, commit: str) -> None:
    stated = patch.blobs
    for change in git.changes(f"{commit}^", commit):
        made = (change.before, change.after)
        if change.before == change.after:
            continue  # a change of mode alone has no index line
        said = stated.get(change.path, ("", ""))
        if said != made:
            raise ToolError(
                "a patch is not about the file that it meets; nothing was changed",
                where=f"{patch.name}, {change.path}",
                expected=f"index {said[0]}..{said[1]}",
                found=f"index {made[0]}..{made[1]}",
                next_step="if the file below or the patch was meant to change: series apply "
                "--refresh, look at the result, series export",
            )


def am_all(git: Git, series: Series, *, refresh: bool = False) -> str:
    """Apply the whole series on HEAD; returns the last commit."""
    commit = git.commit_id("HEAD")
    assert commit is not None
    for patch in series:
        commit = am(git, patch, refresh=refresh)
    return commit


@contextmanager
def scratch_worktree(git: Git) -> Iterator[Git]:
    """A second work tree on the base commit, gone afterwards."""
    git.run("worktree", "prune")
    try:
        with staging(git.path) as place:
            git.run("worktree", "add", "--quiet", "--detach", str(place), BASE_REF)
            yield Git(place)
    finally:
        git.run("worktree", "prune")


def apply_series(
    project: Project,
    series: Series,
    tree: Path,
    *,
    discard: bool = False,
    refresh: bool = False,
) -> Applied:
    """Bring ``tree`` to the base plus the series, completely or not at all."""
    submodule(project)  # one that is not as pinned is refused, also where it is not needed
    if not tree.exists():
        with staging(tree) as place:
            git = make_base(project, place)
            commit = am_all(git, series, refresh=refresh)
            _remember(git, commit, series, project.pin, refresh)
            place.rename(tree)
        return Applied(commit, len(series), changed=True)
    git = open_tree(tree, project.pin)
    if not discard:
        refuse_unfinished(git)
        refuse_dirt(git)
    head = git.commit_id("HEAD")
    settled = git.current_branch() == BRANCH and not git.dirt()
    applied = git.commit_id(APPLIED_REF)
    record = Record(fingerprint(series, project.pin), git.tree_id(applied or BASE_REF))
    if applied and settled and head == applied and read_record(git) == record:
        return Applied(applied, len(series), changed=False)
    if not discard:
        refuse_unaccounted(git)
    with scratch_worktree(git) as scratch:
        commit = am_all(scratch, series, refresh=refresh)
    changed = head != commit or not settled
    if changed:
        for name in ("rebase-merge", "rebase-apply"):
            shutil.rmtree(tree / ".git" / name, ignore_errors=True)
        force = ["--force"] if discard else []
        git.run("checkout", "--quiet", *force, "-B", BRANCH, commit)
        if discard:
            git.run("clean", "--quiet", "--force", "-d")
    _remember(git, commit, series, project.pin, refresh)
    return Applied(commit, len(series), changed=changed)


def _remember(git: Git, commit: str, series: Series, pin: Pin, refresh: bool) -> None:
    git.run("update-ref", APPLIED_REF, commit)
    # Refreshed patches are not what their files say; no wheel is built before they are exported.
    write_record(git, None if refresh else Record(fingerprint(series, pin), git.tree_id(commit)))
