# SPDX-License-Identifier: Apache-2.0
"""Several turns of one conversation as one completion with all rows.

    said: list[int] = []  # the tokens of all turns before
    turns = []
    for new in environment:  # tokens of a user or a tool
        start = max(0, len(said) - 1)
        (turn,) = generate(url, said + new, {"max_tokens": 64}, start=start)
        turns.append(turn)
        said = [*turn.prompt, *turn.token_ids]
    rows = join_turns(turns).rows  # of every token but the last one

The last token of a turn has no row yet. It is fed to the model with the next turn, so the next turn
starts with its row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from examples.client import Completion, RoutedExpertsError


def join_turns(turns: Sequence[Completion]) -> Completion:
    """The last turn, with the rows of all turns. The prompt of each turn begins with prompt and
    tokens of the turn before. Where turns overlap, the earlier row stays. Raises RoutedExpertsError
    if a turn does not continue the one before, or if rows between two turns are missing."""
    whole = turns[0]
    for turn in turns[1:]:
        said = (*whole.prompt, *whole.token_ids)
        known = whole.start + len(whole.rows)
        if turn.prompt[: len(said)] != said:
            raise RoutedExpertsError(
                f"a turn's prompt of {len(turn.prompt)} tokens does not continue the "
                f"{len(said)} tokens before it"
            )
        if not whole.start <= turn.start <= known:
            raise RoutedExpertsError(
                f"a turn's rows start at position {turn.start}; those before it end at {known}"
            )
        rows = np.concatenate([whole.rows, turn.rows[known - turn.start :]])
        whole = replace(turn, rows=rows, start=whole.start)
    return whole
