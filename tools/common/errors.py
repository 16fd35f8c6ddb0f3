# SPDX-License-Identifier: Apache-2.0
"""Errors that a user reads. Library code raises them, ``tools/__main__.py`` prints them."""

import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


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


class Problems(ToolError):
    """Several errors that were found together."""

    def __init__(self, what: str, problems: Sequence[ToolError]) -> None:
        super().__init__(what)
        self.problems = tuple(problems)

    def __str__(self) -> str:
        return "\n\n".join([f"{self.what}: {len(self.problems)}", *map(str, self.problems)])


class FailedCommand(ToolError):
    """A program that failed, with its output."""

    def __init__(self, command: Sequence[str], returncode: int, output: str) -> None:
        what = f"a command failed with exit status {returncode}"
        super().__init__(what, details=[f"$ {shlex.join(command)}", *output.splitlines()])
