# SPDX-License-Identifier: Apache-2.0
"""The pinned source: from the line's submodule when it is checked out, else from the archive."""

import argparse
from pathlib import Path

from tools.common.cli import add_downloads
from tools.common.errors import ToolError
from tools.common.git import Git
from tools.common.pin import Project
from tools.source.download import fetch

EXAMPLE = "--wheelhouse /media/wheels --offline"


def declare(parser: argparse.ArgumentParser) -> None:
    add_downloads(parser)


def run(arguments: argparse.Namespace, project: Project) -> None:
    """Get the pinned source, and print which it is. Uses the submodule if the line has one and it
    is checked out, else the archive: from the wheelhouse, from build/downloads, or downloaded
    there. An interrupted download continues where it stopped. PIP_INDEX_URL names another package
    index."""
    print(f"source: {fetch_source(project)}")


def submodule(project: Project) -> Path | None:
    """The line's submodule if it is checked out; refuses one that is not as pinned."""
    path, pin = project.submodule, project.pin
    if path is None:
        return None
    update = f"git submodule update --init --checkout {path.name}"
    if not (path / ".git").exists():
        if path.is_dir() and any(path.iterdir()):
            what = "the submodule's directory holds files but no checkout"
            raise ToolError(what, path, next_step=f"empty it, or check it out: {update}")
        return None
    git = Git(path)
    if (head := git.commit_id("HEAD")) != pin.commit:
        what = "the submodule is not at the pinned commit"
        step = f"{update}, or do without it: git submodule deinit {path.name}"
        raise ToolError(what, path, pin.commit, head, step)
    git.refuse_dirt("the submodule is not clean; nothing is ever changed in it")
    return path


def fetch_source(project: Project) -> str:
    """Get the source; return which it is."""
    source = project.pin.source
    if path := submodule(project):
        return f"the submodule {path.name}/ at {project.pin.commit}"
    fetch(source, project)
    return f"the source archive {source.filename}, sha256 {source.sha256}"
