# SPDX-License-Identifier: Apache-2.0
"""Patches as a branch that a person can send to vLLM."""

import argparse
import re
import subprocess
from pathlib import Path

from tools.common.cli import Problems, ToolError, add_path
from tools.common.git import Git
from tools.common.pin import Project
from tools.series.apply import apply_series, scratch_worktree
from tools.series.check import check_needs
from tools.series.series import OWN_HEADER, Patch, choose, read_series, with_needs
from tools.series.tree import APPLIED_REF, BASE_REF, identity

_SENDABLE = ("Pending", "Submitted")
# A header's next lines begin with a blank. Nobody reads mail at .invalid: it is the project's.
_NOT_SENT = re.compile(
    rf"^(?:{OWN_HEADER.pattern}.*(?:\n[ \t].*)*|Signed-off-by: .*\.invalid>[ \t]*)\n?", re.M
)


def declare(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("patches", nargs="+", metavar="PATCH", help="of the series")
    add_path(parser, "--clone", "your clone of vLLM: it gets the branch", required=True)
    text = "where it starts, in the clone"
    parser.add_argument("--onto", metavar="REF", required=True, help=text)
    parser.add_argument("--branch", help="its name (default: as the first patch)")


def run(arguments: argparse.Namespace, project: Project) -> None:
    """Make a branch for vLLM with the patches that you name, and with the patches that they need.
    You sign them off (git config). Nothing is pushed: you read it, answer for it and send it."""
    series, label = read_series(project.series_file), arguments.onto
    chosen = choose(series, arguments.patches)
    if kept := [patch for patch in chosen if not patch.status.startswith(_SENDABLE)]:
        expected = f"Upstream-Status: {' or '.join(_SENDABLE)}"
        step = "leave it out, or change its status: CONTRIBUTING.md, Editing a patch"
        name, status = kept[0].name, kept[0].status
        raise ToolError("a patch is not for upstream", name, expected, status, step)
    if problems := check_needs(series):
        raise Problems("the series breaks its rules", problems=problems)
    apply_series(project, series)
    clone, who = Git(arguments.clone), find_person(arguments.clone)
    base = None if label.startswith("-") else clone.commit_id(label)
    if base is None:
        what, expected = "the clone has no such ref", "a tag, a branch or a commit"
        raise ToolError(what, clone.path, expected, label, "git fetch --tags origin")
    inside = with_needs(series, [patch.name for patch in chosen])
    commits = Git(project.tree).commits(f"{BASE_REF}..{APPLIED_REF}")
    stack = [pair for pair in zip(series, commits, strict=True) if pair[0].name in inside]
    clone.fetch(project.tree, "--no-write-fetch-head", APPLIED_REF)
    with scratch_worktree(clone, base, project.build / "submit") as git:
        for patch, commit in stack:
            pick(git, patch, commit, label, who)
        head = git.text("rev-parse", "HEAD")
    branch = arguments.branch or chosen[0].name.removesuffix(".patch")
    old = clone.commit_id(f"refs/heads/{branch}")
    if old and old != head:
        what, found = "a branch of this name exists; no branch was made", clone.log(old)
        step = f"delete it: git -C {clone.path} branch -D {branch}; or: --branch"
        raise ToolError(what, branch, found=found, next_step=step)
    below = [patch for patch, _ in stack if patch not in chosen]
    if not old:
        clone.run("branch", "--no-track", branch, head)
    print(f"branch {branch}: {', '.join(patch.name for patch in chosen)}")
    if below:
        names = ", ".join(patch.name for patch in below)
        print(f"  stacked on {names}: these go first, or with it")
    print("Nothing was pushed. Read every changed line, and run the tests: the messages say which.")


def find_person(clone: Path) -> tuple[str, str]:
    """Name and address that git would commit with in a clone; a placeholder is refused."""
    if not (clone / ".git").exists():
        what, step = "this is not a clone of vLLM", "name the top directory of one: --clone <path>"
        raise ToolError(what, clone, "a directory with .git", next_step=step)
    # With the user's own configuration, which the tools read nowhere else.
    command = ["git", "-C", str(clone), "-c", "user.useConfigOnly=true"]
    command += ["var", "GIT_COMMITTER_IDENT"]
    said = subprocess.run(command, capture_output=True, text=True).stdout
    match = re.match(r"(.+) <(\S+@\S+\.\S+)> ", said)
    if not match or match[2].endswith(".invalid"):
        what = "a sign-off is a person's, and git knows no person here"
        expected = "the name and the address of who answers for the patch"
        step = "git config --global user.name '...'; git config --global user.email '...'"
        raise ToolError(what, clone, expected, said.strip() or "nobody", step)
    return match[1], match[2]


def message_for(patch: Patch) -> str:
    """The commit message for upstream: without the series' own headers and sign-off."""
    body = _NOT_SENT.sub("", patch.body).strip()
    return re.sub(r"\n{3,}", "\n\n", f"{patch.subject}\n\n{body}\n")


def pick(git: Git, patch: Patch, commit: str, label: str, who: tuple[str, str]) -> None:
    """Put a patch on top, as the person's own commit."""
    if git.run("cherry-pick", "--no-commit", commit, accept=(0, 1)).returncode:
        what = f"a patch does not fit {label}; no branch was made"
        found = "conflicts in " + ", ".join(git.changed("--diff-filter=U"))
        step = "put the patch that it needs into its Needs:; or choose a base nearer to the pin"
        step += "; or begin a line there: series line"
        raise ToolError(what, patch.name, found=found, next_step=step)
    if not git.changed("--cached", "HEAD"):
        what = f"{label} contains a patch already; no branch was made"
        raise ToolError(what, where=patch.name, next_step="leave it out")
    words = ("commit", "--quiet", "--cleanup=verbatim", "--signoff", "-F", "-")
    env = identity(git.log(commit, "%aI"), *who)
    git.run(*words, stdin=message_for(patch).encode(), env=env)
