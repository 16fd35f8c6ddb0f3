# SPDX-License-Identifier: Apache-2.0
"""The build tree: a repository with the base commit and one commit for each patch.

It remembers, in refs and in a record beside them, which commits the patches can give back.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from tools.common.errors import ToolError
from tools.common.files import write
from tools.common.git import Git
from tools.common.pin import Pin
from tools.series.base import BASE_REF, BRANCH, base_message

APPLIED_REF = "refs/re/applied"
EXPORTED_REF = "refs/re/exported"


@dataclass(frozen=True)
class Record:
    """Which series gives which tree: proved by an apply, or by an export applied again."""

    fingerprint: str
    tree: str


def open_tree(path: Path, pin: Pin) -> Git:
    """The repository at ``path``; one of another pin, or not ours, is refused."""
    if not path.exists():
        raise ToolError(
            "there is no build tree", where=path, next_step="python -m tools series apply"
        )
    git = Git(path)
    base = git.commit_id(BASE_REF) if (path / ".git").exists() else None
    if base is None:
        raise ToolError(
            "this directory was not made by series apply",
            where=path,
            expected=f"a repository with {BASE_REF}",
            next_step="move it away, then: python -m tools series apply",
        )
    found = git.message(base).strip()
    if found != base_message(pin).strip() or git.tree_id(base) != pin.tree:
        raise ToolError(
            "the build tree belongs to another pin",
            where=path,
            expected=f"source sha256 {pin.source.sha256}",
            found=found.splitlines()[-1].replace("Source-sha256:", "source sha256"),
            next_step="keep what you need of it, then move or delete it",
        )
    return git


def read_record(git: Git) -> Record | None:
    path = git.path / ".git" / "re-record.json"
    return Record(**json.loads(path.read_text())) if path.exists() else None


def write_record(git: Git, record: Record | None) -> None:
    path = git.path / ".git" / "re-record.json"
    if record is None:
        path.unlink(missing_ok=True)
    else:
        write(path, json.dumps(asdict(record), indent=2) + "\n")


def refuse_unfinished(git: Git) -> None:
    """Refuse while a rebase, am, merge or cherry-pick waits to be finished."""
    for name in ("rebase-merge", "rebase-apply", "MERGE_HEAD", "CHERRY_PICK_HEAD", "REVERT_HEAD"):
        if (git.path / ".git" / name).exists():
            raise ToolError(
                "a git operation is under way in the build tree",
                where=git.path,
                found=f".git/{name}",
                next_step=f"finish or abort it: git -C {git.path} status",
            )


def refuse_dirt(git: Git) -> None:
    """Refuse over a work tree with changes that no commit holds."""
    git.refuse_dirt("the build tree has changes that are not committed")


def unaccounted(git: Git) -> list[str]:
    """Commits on the branch or a detached HEAD that no patch can give back, oldest first."""
    known = [
        commit
        for commit in map(git.commit_id, (BASE_REF, APPLIED_REF, EXPORTED_REF))
        if commit is not None
    ]
    tips = [git.commit_id(f"refs/heads/{BRANCH}")]
    if git.current_branch() is None:
        tips.append(git.commit_id("HEAD"))
    return git.commits(*(tip for tip in tips if tip), *(f"^{commit}" for commit in known))


def refuse_unaccounted(git: Git) -> None:
    if lost := unaccounted(git):
        known = [
            f"{ref}  {git.oneline(ref)}"
            for ref in (BASE_REF, APPLIED_REF, EXPORTED_REF)
            if git.commit_id(ref)
        ]
        raise ToolError(
            "the build tree has commits that the series does not account for",
            where=git.path,
            expected="HEAD at a known commit",
            found=f"{len(lost)} commits that would be lost",
            next_step="keep them: python -m tools series export; or lose them: --discard",
            details=[
                *("would be lost:", *(f"  {git.oneline(commit)}" for commit in lost)),
                *("known commits:", *(f"  {line}" for line in known)),
            ],
        )
