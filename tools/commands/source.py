# SPDX-License-Identifier: Apache-2.0
"""The room of the pinned source."""

from __future__ import annotations

import argparse

from tools.commands.common import Room, add_downloads, progress
from tools.pin import Project
from tools.source import fetch_source


def add(parent: argparse._SubParsersAction) -> None:
    room = Room(parent, "source", "the pinned source of vLLM")
    add_downloads(room.verb("fetch", fetch, "--wheelhouse /media/wheels --offline"))


def fetch(arguments: argparse.Namespace, project: Project) -> int:
    """Have the pinned source on this machine, and say which it is. The submodule vllm/ is used
    when it is checked out; else the archive: of the wheelhouse, of build/downloads, or downloaded
    there. A download that was cut off goes on where it stopped. PIP_INDEX_URL names another
    package index."""
    with progress(project.pin.source) as advance:
        source = fetch_source(project, advance)
    print(f"source: {source}")
    return 0
