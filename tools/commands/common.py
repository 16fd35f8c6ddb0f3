# SPDX-License-Identifier: Apache-2.0
"""What the verbs of all rooms share: how they are declared, and the progress bar."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from tools.download import Advance
from tools.pin import PinnedFile, Project

Verb = Callable[[argparse.Namespace, Project], int]


class Room:
    """A group of verbs below ``python -m tools``."""

    def __init__(self, parent: argparse._SubParsersAction, name: str, summary: str) -> None:
        self.name = name
        parser = parent.add_parser(name, help=summary, description=summary)
        self.verbs = parser.add_subparsers(metavar="VERB", required=True)

    def verb(self, name: str, function: Verb, example: str) -> argparse.ArgumentParser:
        """Declare a verb; the function's docstring is its help."""
        text = " ".join((function.__doc__ or "").split())
        parser = self.verbs.add_parser(
            name,
            help=text.split(". ")[0].split("; ")[0].rstrip("."),
            description=text,
            epilog=f"example:\n  python -m tools {self.name} {name} {example}".rstrip(),
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        parser.set_defaults(verb=function)
        return parser


def add_tree(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tree", type=Path, help="the build tree (default: build/vllm)")


def add_series(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--series", type=Path, help="the series (default: patches/series)")


def add_downloads(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--wheelhouse", type=Path, metavar="DIR", help="take pinned files from here first"
    )
    parser.add_argument("--offline", action="store_true", help="never ask the network")


@contextmanager
def progress(pinned: PinnedFile) -> Iterator[Advance]:
    """A bar on standard error that appears with the first byte downloaded."""
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        console=Console(stderr=True),
    )
    task = bar.add_task(pinned.filename, total=pinned.size)

    def advance(count: int) -> None:
        bar.start()
        bar.advance(task, count)

    try:
        yield advance
    finally:
        if bar.tasks[0].completed:
            bar.stop()
