# SPDX-License-Identifier: Apache-2.0
"""A named break of the code under test (`python -m checks.mutants`)."""

from __future__ import annotations

from dataclasses import dataclass

# Of each setup. Few notice most mutants at once; the others get many.
EXAMPLES = (100, 1500)


@dataclass(frozen=True)
class Mutant:
    """One line of the code under test, and what it becomes."""

    name: str
    file: str
    before: str
    after: str
    # For pytest's -k: the setups, or the tests of `engines`, that can notice it. Else all run.
    setups: str = ""
    examples: tuple[int, ...] = EXAMPLES
    # A file of tests that run engines. It takes the place of the property tests.
    engines: str = ""
