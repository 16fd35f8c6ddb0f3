# SPDX-License-Identifier: Apache-2.0
"""Arguments that several commands take, and what they print and write."""

import argparse
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

Parser = argparse._ActionsContainer


def add_tree(parser: Parser) -> None:
    parser.add_argument("--tree", type=Path, help="the build tree (default: build/<line>/vllm)")


def add_downloads(parser: Parser) -> None:
    add_path(parser, "--wheelhouse", "take pinned files from this directory first")
    add_flag(parser, "--offline", "never use the network")


def add_path(parser: Parser, name: str, text: str) -> None:
    parser.add_argument(name, type=Path, help=text)


def add_flag(parser: Parser, name: str, text: str) -> None:
    parser.add_argument(name, action="store_true", help=text)


def tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """The lines of a Markdown table."""
    return [f"| {' | '.join(row)} |" for row in (titles, ["---"] * len(titles), *rows)]


def count(number: int, noun: str, plural: str | None = None) -> str:
    return f"{number} {noun if number == 1 else plural or noun + 's'}"
