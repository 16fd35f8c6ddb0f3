# SPDX-License-Identifier: Apache-2.0
"""The base commit: the pinned release, as the one commit that the patches stand on."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from tools.common.errors import ToolError
from tools.common.files import staging
from tools.common.git import Git
from tools.common.pin import Pin, Project
from tools.series.patch import PROJECT_EMAIL, PROJECT_NAME
from tools.source.archive import unpack
from tools.source.download import fetch
from tools.source.fetch import submodule

BASE_REF = "refs/re/base"
BRANCH = "routed-experts"

# One date for all, so that the base commit has one id everywhere.
_DATE = "2000-01-01T00:00:00+0000"


def base_message(pin: Pin) -> str:
    """The base commit's message: the record of the pin that a build directory carries."""
    return (
        f"vLLM {pin.version}\n\nRelease: {pin.git_tag}\nCommit: {pin.commit}\n"
        f"Source-sha256: {pin.source.sha256}\n"
    )


def unpack_source(archive: Path, archive_only: Sequence[str], into: Path) -> tuple[Git, str]:
    """A fresh repository in the empty directory ``into`` with the archive's files staged.

    Returns it and the id of their tree; ``archive_only`` is left out.
    """
    with staging(into) as scratch:
        top = unpack(archive, scratch)
        for path in (top / name for name in archive_only):
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
        for child in top.iterdir():
            child.rename(into / child.name)
    git = Git(into)
    git.init(BRANCH)
    # --force: the release tracks files that its own .gitignore names.
    git.run("add", "--force", "--all", ".")
    return git, git.text("write-tree")


def make_base(project: Project, into: Path) -> Git:
    """A fresh repository in the empty directory ``into`` whose one commit is the release.

    The branch stands on that commit and ``refs/re/base`` remembers it.
    """
    pin = project.pin
    if path := submodule(project):
        git = Git(into)
        git.init(BRANCH)
        git.run("fetch", "--quiet", "--depth=1", "--no-tags", path.resolve().as_uri(), "HEAD")
        tree = git.tree_id("FETCH_HEAD")
    else:
        git, tree = unpack_source(fetch(pin.source, project), pin.archive_only, into)
    if tree != pin.tree:
        raise ToolError(
            "the source does not give the pinned tree",
            where=path or pin.source.filename,
            expected=f"tree {pin.tree}",
            found=f"tree {tree}",
            next_step="check [release] in upstream.toml",
        )
    commit_base(git, pin)
    return git


def commit_base(git: Git, pin: Pin) -> None:
    """Commit the pinned tree, which the repository has, as the base, and stand on it."""
    message = base_message(pin).encode()
    commit = git.run("commit-tree", pin.tree, "-F", "-", stdin=message, env=identity(_DATE))
    base = commit.stdout.decode().strip()
    git.run("update-ref", BASE_REF, base)
    git.run("reset", "--hard", "--quiet", base)
    # So that commits made here by hand carry the identity that the series' rules ask for.
    git.run("config", "user.name", PROJECT_NAME)
    git.run("config", "user.email", PROJECT_EMAIL)


def identity(
    date: str | None = None, name: str = PROJECT_NAME, email: str = PROJECT_EMAIL
) -> dict[str, str]:
    """Author and committer of a commit, for git's environment; by default the project."""
    facts = {"NAME": name, "EMAIL": email, **({"DATE": date} if date else {})}
    return {f"GIT_{who}_{key}": v for who in ("AUTHOR", "COMMITTER") for key, v in facts.items()}
