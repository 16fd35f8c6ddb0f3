# SPDX-License-Identifier: Apache-2.0
"""The build tree: a repository with the release as base commit and one commit for each patch.

Refs and a record beside them tell which commits the patches reproduce.
"""

import subprocess
from collections.abc import Sequence
from pathlib import Path

from tools.common.cli import ToolError
from tools.common.git import Git
from tools.common.pin import Pin, Project
from tools.series.series import PROJECT_EMAIL, PROJECT_NAME, Series, fingerprint
from tools.source.fetch import fetch

BRANCH = "routed-experts"
BASE_REF = "refs/re/base"
APPLIED_REF = "refs/re/applied"
EXPORTED_REF = "refs/re/exported"
UNFINISHED = ("rebase-merge", "rebase-apply", "MERGE_HEAD", "CHERRY_PICK_HEAD", "REVERT_HEAD")


def base_message(pin: Pin) -> str:
    """The base commit's message, which states the pin."""
    return (
        f"vLLM {pin.version}\n\nRelease: {pin.tag}\nCommit: {pin.commit}\n"
        f"Source-sha256: {pin.source.sha256}\n"
    )


def identity(
    date: str = "", name: str = PROJECT_NAME, email: str = PROJECT_EMAIL
) -> dict[str, str]:
    """Author and committer of a commit, for git's environment; by default the project, now."""
    facts = {"NAME": name, "EMAIL": email, "DATE": date}
    return {f"GIT_{who}_{key}": v for who in ("AUTHOR", "COMMITTER") for key, v in facts.items()}


def unpack_source(archive: Path, archive_only: Sequence[str], into: Path) -> tuple[Git, str]:
    """A fresh repository in the empty directory ``into`` with the archive's files staged.

    Returns it and the id of their tree. The archive's top directory and ``archive_only`` are left
    out.
    """
    command = ["tar", "-xf", str(archive.resolve()), "--strip-components=1", "--no-same-owner"]
    done = subprocess.run(command, cwd=into, capture_output=True, text=True)
    if done.returncode:
        raise ToolError("the archive cannot be unpacked", archive, found=done.stderr.strip())
    git = Git(into)
    git.run("init", "-q", "--template=", "--object-format=sha1", f"--initial-branch={BRANCH}")
    # --force: the release tracks files that its own .gitignore names.
    git.run("add", "--force", "--all", ".")
    git.run("rm", "-r", "--quiet", "--force", "--ignore-unmatch", "--", *archive_only)
    return git, git.text("write-tree")


def make_base(project: Project, into: Path) -> Git:
    """A fresh repository in the empty directory ``into`` whose one commit is the release."""
    pin = project.pin
    git, tree = unpack_source(fetch(pin.source, project), pin.archive_only, into)
    if tree != pin.tree:
        what, where = "the source does not give the pinned tree", pin.source.filename
        step = "check [release] in upstream.toml"
        raise ToolError(what, where, f"tree {pin.tree}", f"tree {tree}", step)
    commit_base(git, pin)
    return git


def commit_base(git: Git, pin: Pin) -> None:
    """Commit the pinned tree, which the repository has, as the base, and stand on it."""
    # One date for all, so that the base commit has one id everywhere.
    who, message = identity("2000-01-01T00:00:00+0000"), base_message(pin).encode()
    commit = git.run("commit-tree", pin.tree, "-F", "-", stdin=message, env=who)
    git.run("update-ref", BASE_REF, commit.stdout.decode().strip())
    git.run("reset", "--hard", "--quiet", BASE_REF)
    # So that commits made here by hand carry the identity that the series' rules ask for.
    git.run("config", "user.name", PROJECT_NAME)
    git.run("config", "user.email", PROJECT_EMAIL)


def open_tree(project: Project) -> Git:
    """The project's build tree; refuses one of another pin, or one that apply did not make."""
    git, pin = Git(project.tree), project.pin
    base = git.commit_id(BASE_REF) if (git.path / ".git").exists() else None
    if base is None:
        step = "move away what lies there, then: python -m tools series apply"
        raise ToolError("there is no build tree", git.path, next_step=step)
    message = git.log(base, "%B")
    if message != base_message(pin).strip() or git.tree_id(base) != pin.tree:
        expected, found = f"source sha256 {pin.source.sha256}", message.splitlines()[-1]
        step = "keep what you need, then delete it"
        raise ToolError("the build tree belongs to another pin", git.path, expected, found, step)
    return git


def open_settled(project: Project) -> Git:
    """The build tree, with no operation under way and nothing uncommitted."""
    git = open_tree(project)
    for name in UNFINISHED:
        if (git.path / ".git" / name).exists():
            what = f"a git operation is under way in the build tree (.git/{name})"
            step = f"finish or abort it: git -C {git.path} status"
            raise ToolError(what, git.path, next_step=step)
    if dirt := git.dirt():
        what = "the build tree has changes that are not committed"
        step = f"commit or stash them: git -C {git.path} status"
        raise ToolError(what, git.path, next_step=step, details=dirt[:20])
    return git


def record(git: Git, series: Series, pin: Pin, revision: str = "HEAD") -> str:
    """What an apply proves, or an export applied again: which series gives which tree."""
    return f"{fingerprint(series, pin)} {git.tree_id(revision)}"


def read_record(git: Git) -> str:
    """The record in the build tree's own configuration; empty if there is none."""
    return git.text("config", "--local", "--get", "re.record", accept=(0, 1))


def write_record(git: Git, record: str) -> None:
    git.run("config", "--local", "re.record", record)


def unaccounted(git: Git) -> list[str]:
    """Commits on the branch or on HEAD that no patch reproduces, oldest first."""
    branch = f"refs/heads/{BRANCH}"
    return git.commits("--ignore-missing", "HEAD", branch, "--not", "--glob=refs/re/*")
