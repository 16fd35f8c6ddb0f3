# SPDX-License-Identifier: Apache-2.0
"""From commits to patch files."""

import argparse
from collections.abc import Sequence

from tools.common.cli import Problems, ToolError, add_flag, add_tree
from tools.common.files import write
from tools.common.git import Git
from tools.common.pin import Project
from tools.series import tree
from tools.series.apply import am, scratch_worktree
from tools.series.check import check_patch
from tools.series.series import FILENAME, Patch, Series, read_series, slug
from tools.series.tree import BASE_REF, EXPORTED_REF

# What differs from git's defaults, which hold here: the caller's configuration is not read.
_FORMAT = (
    "--always",  # an empty commit too, so that it can be named and refused
    "--no-signature",  # else the last line is the version of git
    "--zero-commit",  # else an edit changes the first line of every later patch
    "--no-stat",  # its columns depend on the longest name
    "--full-index",  # abbreviations grow with the repository
    "--no-renames",  # a detected rename depends on thresholds
    "--no-indent-heuristic",  # where a hunk slides to depends on git's version
)


def declare(parser: argparse.ArgumentParser) -> None:
    add_tree(parser)
    add_flag(parser, "--check", "write nothing; fail if a file would change")
    text = "remove this patch, whose commit is gone on purpose (may be repeated)"
    parser.add_argument("--drop", action="append", default=[], metavar="PATCH", help=text)


def run(arguments: argparse.Namespace, project: Project) -> None:
    """Write the commits of the build tree to patches/<line>, one file each. A patch keeps its file
    name through edits, and a commit that did not change keeps its bytes."""
    changes = export_series(project, check=arguments.check, drop=arguments.drop)
    if arguments.check and changes:
        what = f"{len(changes)} files of the series are not what the build tree exports"
        raise ToolError(what, next_step="python -m tools series export", details=changes)
    for name, done in changes.items():
        print(f"{done} {name}")
    print(f"series: {len(read_series(project.series_file))} patches, {len(changes)} files changed")


def draft_series(git: Git, commits: Sequence[str], old: Series) -> Series:
    """What the commits would be as a series; the bytes depend on nothing but the commits.

    A commit that ``apply`` made states the name of its patch. Another one has the name of the old
    patch with its subject, or else is named for its subject.
    """
    words = ("format-patch", "-1", "--stdout", *_FORMAT)
    known = {patch.subject: patch.name for patch in old}
    drafts = []
    for commit in commits:
        data = git.run(*words, commit).stdout
        stated, draft = FILENAME.search(data), Patch("draft", FILENAME.sub(b"", data, count=1))
        name = known.get(draft.subject, f"{slug(draft.subject)}.patch")
        drafts.append(Patch(stated[1].decode() if stated else name, draft.data))
    names = [draft.name for draft in drafts]
    # The name of a removed patch may be taken again; two patches of one export may not clash.
    if bad := [name for name in names if names.count(name) > 1]:
        found = " / ".join(draft.subject for draft in drafts if draft.name == bad[0])
        step = "reword one: in the build tree, git rebase -i refs/re/base"
        raise ToolError("two patches would have the same file name", bad[0], None, found, step)
    return tuple(drafts)


def export_series(
    project: Project, *, check: bool = False, drop: Sequence[str] = ()
) -> dict[str, str]:
    """Write the commits of the build tree to the series, once all of them are known to be good.

    Returns what was done, by file. With ``check`` everything is done but the writing.
    """
    git, series_file = tree.open_settled(project), project.series_file
    old = read_series(series_file) if series_file.exists() else Series()
    new = draft_series(git, _exportable(git), old)
    names = [patch.name for patch in new]
    if problems := [problem for patch in new for problem in check_patch(patch)]:
        raise Problems("commits that break the rules of the series", problems=problems)
    before = {patch.name: patch.data for patch in old}
    removed = [name for name in before if name not in names]
    changes = {patch.name: "wrote" for patch in new if before.get(patch.name) != patch.data}
    changes |= dict.fromkeys(removed, "removed")
    if names != list(before):
        changes["series"] = "wrote"
    # By name only, so that a half-applied series loses nothing.
    if (lost := [name for name in removed if name not in drop]) and not check:
        what, found = "patches of the series have no commit in the build tree", ", ".join(lost)
        step = "to remove them: series export " + " ".join(f"--drop {name}" for name in lost)
        raise ToolError(what, found=found, next_step=step)
    proof = tree.record(git, new, project.pin)
    if tree.read_record(git) != proof:
        _prove_round_trip(git, new)
    if not check:
        if changes:  # what stops in between can be done again
            for patch in new:
                write(series_file.parent / patch.name, patch.data)
            write(series_file, "".join(f"{name}\n" for name in names))
            for name in removed:
                (series_file.parent / name).unlink()
        git.run("update-ref", EXPORTED_REF, "HEAD")
        tree.write_record(git, proof)
    return changes


def _exportable(git: Git) -> list[str]:
    """The commits above the base, oldest first; refuses what cannot be a series."""
    if git.run("merge-base", "--is-ancestor", BASE_REF, "HEAD", accept=(0, 1)).returncode:
        step = f"git -C {git.path} rebase -i --onto {BASE_REF} <the commit before yours>"
        raise ToolError("HEAD does not stand on the base commit", git.path, next_step=step)
    if merges := git.commits("--merges", f"{BASE_REF}..HEAD"):
        step = f"git -C {git.path} rebase -i {BASE_REF}"
        raise ToolError("a merge commit has no patch", found=git.log(merges[0]), next_step=step)
    return git.commits(f"{BASE_REF}..HEAD")


def _prove_round_trip(git: Git, series: Series) -> None:
    """Apply what would be written: each commit must give the same patch again."""
    with scratch_worktree(git) as scratch:
        again = draft_series(git, [am(scratch, patch) for patch in series], series)
    for patch, other in zip(series, again, strict=True):
        if patch != other:
            step = "look for a line in the message that begins like a diff, such as ---"
            what = "a patch would not give back its commit"
            raise ToolError(what, patch.name, next_step=step)
