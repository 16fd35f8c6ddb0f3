# SPDX-License-Identifier: Apache-2.0
"""A person's clone of vLLM, and refs in it."""

from __future__ import annotations

from pathlib import Path

from tools.common.errors import ToolError
from tools.common.git import Git


def open_clone(path: Path) -> Git:
    """The repository at ``path``, which must be the top directory of a clone."""
    if not (path / ".git").exists():
        raise ToolError(
            "this is not a clone of vLLM",
            where=path,
            expected="a directory with .git",
            next_step="name the top directory of a clone: --clone <path>",
        )
    return Git(path)


def resolve(git: Git, ref: str) -> str:
    """The commit that a ref of the clone names; ``1.2.3`` may name the tag ``v1.2.3``."""
    found = None if ref.startswith("-") else git.commit_id(ref) or git.commit_id(f"v{ref}")
    if found is None:
        raise ToolError(
            "the clone has no such ref",
            where=git.path,
            expected="a tag, a branch or a commit",
            found=ref,
            next_step=f"fetch it: git -C {git.path} fetch --tags origin",
        )
    return found
