# SPDX-License-Identifier: Apache-2.0
"""The real project for the tests that need the pinned files themselves."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.lines import installed
from tools.common.cli import ToolError
from tools.common.pin import PinnedFile, Project, lines
from tools.series.series import Series, read_series
from tools.source.fetch import fetch

PROJECT = Project(Path(__file__).resolve().parent.parent, installed())
# Every line of this repository.
PROJECTS = [Project(PROJECT.root, line) for line in lines(PROJECT.root)]


def real_series(project: Project = PROJECT) -> Series:
    """The series of a line of this repository; without patches there is nothing to test."""
    series = read_series(project.series_file) if project.series_file.exists() else Series()
    if not series:
        pytest.skip(f"{project.series_file} lists no patch")
    return series


def need_source(project: Project = PROJECT) -> None:
    """The pinned source, or a skipped test where it cannot be had."""
    try:
        fetch(project.pin.source, project)
    except ToolError as error:
        _skip_without_network(error)


def need(pinned: PinnedFile) -> Path:
    """A pinned file, or a skipped test where it cannot be had."""
    try:
        return fetch(pinned, PROJECT)
    except ToolError as error:
        _skip_without_network(error)
        raise


def _skip_without_network(error: ToolError) -> None:
    """Only a missing network skips; a wrong digest fails."""
    if error.next_step is not None and "check the network" in error.next_step:
        pytest.skip(str(error))
    raise error
