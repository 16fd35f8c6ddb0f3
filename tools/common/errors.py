# SPDX-License-Identifier: Apache-2.0
"""Errors that a user reads. Library code raises them, ``tools/__main__.py`` prints them."""

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


@dataclass(eq=False)
class Problems(ToolError):
    """Several errors that were found together."""

    problems: Sequence[ToolError] = ()

    def __str__(self) -> str:
        return "\n\n".join([f"{self.what}: {len(self.problems)}", *map(str, self.problems)])
