# SPDX-License-Identifier: Apache-2.0
"""The repository that a release is made from."""

from __future__ import annotations

import re
from pathlib import Path

from tools.common.errors import ToolError
from tools.common.git import Git
from tools.common.pin import Project
from tools.series.check import check_series
from tools.series.export import export_series


def open_repository(project: Project) -> Git:
    """The project's own repository, with nothing that is not committed."""
    git = Git(project.root)
    if not (project.root / ".git").exists() or git.commit_id("HEAD") is None:
        raise ToolError(
            "a release is made from a commit",
            where=project.root,
            expected="a git repository with a commit",
        )
    git.refuse_dirt("the repository has changes that are not committed")
    return git


def read_tags(git: Git) -> dict[int, str]:
    """Commits of the releases made so far, by number."""
    names = git.text("tag", "--list", "re.*").split()
    found = {int(name[3:]): git.commit_id(name) for name in names if re.fullmatch(r"re\.\d+", name)}
    return {number: commit for number, commit in found.items() if commit is not None}


def refuse_stale(project: Project, tree: Path) -> None:
    check_series(project.series_file)
    stale = export_series(project, project.series_file, tree, check=True).stale
    if stale:
        raise ToolError(
            "the build tree has what the series has not",
            where=tree,
            expected="what the build tree exports",
            found=f"{len(stale)} files of the series that are not that",
            next_step="python -m tools series export, and commit; or series apply",
            details=stale,
        )
