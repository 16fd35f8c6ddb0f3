# SPDX-License-Identifier: Apache-2.0
"""Arguments that several commands take, what they print, and errors that a user reads."""

import argparse
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

Parser = argparse._ActionsContainer


def add_tree(parser: Parser) -> None:
    parser.add_argument("--tree", type=Path, help="the build tree (default: build/<line>/vllm)")


def add_path(parser: Parser, name: str, text: str, required: bool = False) -> None:
    parser.add_argument(name, type=Path, help=text, required=required)


def add_flag(parser: Parser, name: str, text: str) -> None:
    parser.add_argument(name, action="store_true", help=text)


def tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """The lines of a Markdown table."""
    return [f"| {' | '.join(row)} |" for row in (titles, ["---"] * len(titles), *rows)]


def count(number: int, noun: str, plural: str | None = None) -> str:
    return f"{number} {noun if number == 1 else plural or noun + 's'}"


@dataclass(eq=False)
class ToolError(Exception):
    """What is wrong, where, expected against found, and what to do next."""

    what: str
    where: object = None
    expected: object = None
    found: object = None
    next_step: str | None = None
    details: Iterable[str] = ()

    def __str__(self) -> str:
        values = (self.where, self.expected, self.found, self.next_step)
        rows = zip(("where", "expected", "found", "next"), values, strict=True)
        lines = [f"  {label + ':':<10}{value}" for label, value in rows if value is not None]
        return "\n".join([self.what, *lines, *(f"    {line}" for line in self.details)])


@dataclass(eq=False)
class Problems(ToolError):
    """Several errors that were found together."""

    problems: Sequence[ToolError] = ()

    def __str__(self) -> str:
        return "\n\n".join([f"{self.what}: {len(self.problems)}", *map(str, self.problems)])
