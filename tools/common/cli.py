# SPDX-License-Identifier: Apache-2.0
"""Arguments that several verbs take, and what they print while they work."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from tools.common.pin import Project

# Called with a line about what was done.
Tell = Callable[[str], None]


def add_tree(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tree", type=Path, help="the build tree (default: build/<line>/vllm)")


def add_series(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--series", type=Path, help="the series (default: patches/<line>/series)")


def add_downloads(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--wheelhouse", type=Path, metavar="DIR", help="take pinned files from here first"
    )
    add_flag(parser, "--offline", "never use the network")


def add_flag(parser: argparse._ActionsContainer, name: str, text: str) -> None:
    parser.add_argument(name, action="store_true", help=text)


def add_many(parser: argparse.ArgumentParser, name: str, metavar: str, text: str) -> None:
    """An option that may be repeated; a list."""
    text += " (may be repeated)"
    parser.add_argument(name, action="append", default=[], metavar=metavar, help=text)


def tree_of(arguments: argparse.Namespace, project: Project) -> Path:
    return arguments.tree or project.tree


def series_of(arguments: argparse.Namespace, project: Project) -> Path:
    return arguments.series or project.series_file


def tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
