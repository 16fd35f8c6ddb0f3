# SPDX-License-Identifier: Apache-2.0
"""The room of the pinned source."""

from __future__ import annotations

import argparse

from tools.commands.common import Room, progress
from tools.pin import Project
from tools.source import fetch_source


def add(parent: argparse._SubParsersAction) -> None:
    room = Room(parent, "source", "the pinned source of vLLM")
    room.verb("fetch", fetch, "")


def fetch(arguments: argparse.Namespace, project: Project) -> int:
    """Have the pinned source on this machine, and say which it is. The submodule vllm/ is used
    when it is checked out; else the archive, downloaded into build/downloads unless it is there.
    PIP_INDEX_URL names another package index."""
    with progress(project.pin.source) as advance:
        source = fetch_source(project, advance)
    print(f"source: {source}")
    return 0
