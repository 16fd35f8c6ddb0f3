# SPDX-License-Identifier: Apache-2.0
"""The pinned source: from the submodule when it is checked out, else from the archive."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tools.archive import unpack
from tools.download import Advance, fetch
from tools.errors import ToolError
from tools.git import Git
from tools.patch import PROJECT_EMAIL, PROJECT_NAME
from tools.pin import Downloads, Pin, PinnedFile, Project

BASE_REF = "refs/re/base"
BRANCH = "routed-experts"

# One date for all, so that the base commit has one id everywhere.
_DATE = "2000-01-01T00:00:00+0000"


@dataclass(frozen=True)
class Submodule:
    """``vllm/``, checked out at the pinned commit and clean."""

    path: Path
    commit: str

    def __str__(self) -> str:
        return f"the submodule {self.path.name}/ at {self.commit}"


@dataclass(frozen=True)
class Archive:
    """The source archive, which may still have to be downloaded."""

    file: PinnedFile
    downloads: Downloads

    def __str__(self) -> str:
        return f"the source archive {self.file.filename}, sha256 {self.file.sha256}"


def choose_source(project: Project) -> Submodule | Archive:
    """Which source is used; a submodule that is checked out but not as pinned is refused."""
    path, pin = project.submodule, project.pin
    if not (path / ".git").exists():
        if path.is_dir() and any(path.iterdir()):
            raise ToolError(
                "the submodule's directory holds files but no checkout",
                where=path,
                expected="an empty directory or a checkout",
                next_step=f"empty it, or check it out: git submodule update --init --checkout "
                f"{path.name}",
            )
        return Archive(pin.source, project.downloads)
    git = Git(path)
    head = git.commit_id("HEAD")
    update = f"git submodule update --init --checkout {path.name}"
    if head != pin.commit:
        raise ToolError(
            "the submodule is not at the pinned commit",
            where=path,
            expected=pin.commit,
            found=head,
            next_step=f"{update}, or do without it: git submodule deinit {path.name}",
        )
    if dirt := git.dirt():
        raise ToolError(
            "the submodule is not clean; nothing is ever changed in it",
            where=path,
            expected="no changed and no untracked files",
            found=f"{len(dirt)} of them",
            next_step=f"git -C {path} stash --include-untracked",
            details=dirt[:20],
        )
    return Submodule(path, pin.commit)


def fetch_source(project: Project, advance: Advance = lambda count: None) -> Submodule | Archive:
    """Have the source on this machine; say which it is."""
    source = choose_source(project)
    if isinstance(source, Archive):
        fetch(source.file, source.downloads, advance)
    return source


def base_message(pin: Pin) -> str:
    """The base commit's message: the record of the pin that a build directory carries."""
    return (
        f"vLLM {pin.version}\n\n"
        f"Release: {pin.git_tag}\n"
        f"Commit: {pin.commit}\n"
        f"Source-sha256: {pin.source.sha256}\n"
    )


def unpack_source(archive: Path, archive_only: Sequence[str], into: Path) -> tuple[Git, str]:
    """A fresh repository in the empty directory ``into`` with the archive's files staged.

    Returns it and the id of their tree; ``archive_only`` is left out.
    """
    with tempfile.TemporaryDirectory(prefix=".unpack-", dir=into.parent) as scratch:
        top = unpack(archive, Path(scratch))
        for name in archive_only:
            path = top / name
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


def make_base(project: Project, source: Submodule | Archive, into: Path) -> Git:
    """A fresh repository in the empty directory ``into`` whose one commit is the release.

    The branch stands on that commit and ``refs/re/base`` remembers it.
    """
    pin = project.pin
    if isinstance(source, Submodule):
        git = Git(into)
        git.init(BRANCH)
        git.run(
            "fetch", "--quiet", "--depth=1", "--no-tags", source.path.resolve().as_uri(), "HEAD"
        )
        tree = git.tree_id("FETCH_HEAD")
    else:
        archive = fetch(source.file, source.downloads)
        git, tree = unpack_source(archive, pin.archive_only, into)
    if tree != pin.tree:
        raise ToolError(
            "the source does not give the pinned tree",
            where=source,
            expected=f"tree {pin.tree}",
            found=f"tree {tree}",
            next_step="check [release] in upstream.toml",
        )
    commit_base(git, pin)
    return git


def commit_base(git: Git, pin: Pin) -> None:
    """Commit the pinned tree, which the repository has, as the base, and stand on it."""
    commit = git.run(
        "commit-tree", pin.tree, "-F", "-", stdin=base_message(pin).encode(), env=identity(_DATE)
    )
    base = commit.stdout.decode().strip()
    git.run("update-ref", BASE_REF, base)
    git.run("reset", "--hard", "--quiet", base)
    # So that commits made here by hand carry the identity that the series' rules ask for.
    git.run("config", "user.name", PROJECT_NAME)
    git.run("config", "user.email", PROJECT_EMAIL)


def identity(date: str | None = None) -> dict[str, str]:
    """Author and committer of everything that the tools commit."""
    who = {}
    for role in ("AUTHOR", "COMMITTER"):
        who[f"GIT_{role}_NAME"] = PROJECT_NAME
        who[f"GIT_{role}_EMAIL"] = PROJECT_EMAIL
        if date:
            who[f"GIT_{role}_DATE"] = date
    return who
