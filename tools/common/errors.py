# SPDX-License-Identifier: Apache-2.0
"""The one family of errors that a user is meant to read.

Library code raises these and neither prints nor exits; ``tools/__main__.py`` does both.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence


class ToolError(Exception):
    """What is wrong, where, expected against found, and what to do next."""

    found_label = "found"

    def __init__(
        self,
        what: str,
        *,
        where: object = None,
        expected: object = None,
        found: object = None,
        next_step: str | None = None,
        details: Iterable[str] = (),
    ) -> None:
        super().__init__(what)
        self.what = what
        self.where = where
        self.expected = expected
        self.found = found
        self.next_step = next_step
        self.details = tuple(details)

    def __str__(self) -> str:
        rows = [
            ("where", self.where),
            ("expected", self.expected),
            (self.found_label, self.found),
            ("next", self.next_step),
        ]
        lines = [self.what]
        lines += [f"  {label + ':':<10}{value}" for label, value in rows if value is not None]
        lines += [f"    {line}" for line in self.details]
        return "\n".join(lines)


class LintProblem(ToolError):
    """A rule of the series that a patch breaks."""

    found_label = "current"

    def __init__(
        self, what: str, where: object, found: object, expected: object, next_step: str
    ) -> None:
        super().__init__(what, where=where, expected=expected, found=found, next_step=next_step)


class Problems(ToolError):
    """Several errors found in one go, so that they can be cured in one go."""

    def __init__(self, what: str, problems: Sequence[ToolError]) -> None:
        super().__init__(what)
        self.problems = tuple(problems)

    def __str__(self) -> str:
        return "\n\n".join([f"{self.what}: {len(self.problems)}", *map(str, self.problems)])


class FailedCommand(ToolError):
    """A program that we ran did not do its work."""

    def __init__(self, command: Sequence[str], returncode: int, output: str) -> None:
        super().__init__(
            f"a command failed with exit status {returncode}",
            details=[f"$ {shlex.join(command)}", *output.splitlines()],
        )
        self.returncode = returncode
        self.output = output
