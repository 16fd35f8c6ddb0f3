# SPDX-License-Identifier: Apache-2.0
"""Markdown that the verbs write."""

from collections.abc import Iterable, Sequence


def table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """The lines of a table."""
    return [f"| {' | '.join(row)} |" for row in (titles, ["---"] * len(titles), *rows)]
