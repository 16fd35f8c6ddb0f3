# SPDX-License-Identifier: Apache-2.0
"""A KV cache that says of each place which forward pass of a token filled it, from what.

Each forward pass of a token has a number, and this number is its row. So the row of another
position, request, draft, pass or weight update is never right by chance.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

# The number of a place that nothing filled, or that a failed load was to fill.
GARBAGE = 0
# The number of a position before a sliding window: the request does not read its KV.
UNSEEN = -1


class KVCache:
    """Places by block, as the KV cache groups share them, and the passes that filled them."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        # The pass that filled each place.
        self.passes = np.full(num_blocks * block_size, GARBAGE)
        # By pass: the tokens up to its own, whether it read nothing but the KV of these, and its
        # weights.
        self.digests = [-1]
        self.is_good = [False]
        self.weights = [0]
        # Passes from before the newest reset have KV and rows that are gone.
        self.first_valid = 1

    def places(self, block_ids: Sequence[int], begin: int, end: int) -> np.ndarray:
        """Where the positions from `begin` to `end` of a request with these blocks are."""
        positions = np.arange(begin, end)
        size = self.block_size
        return np.asarray(block_ids, np.int64)[positions // size] * size + positions % size

    def fill(
        self, places: Sequence[np.ndarray], digests: Sequence[int], weights: int
    ) -> np.ndarray:
        """Passes of the tokens with these digests write to the places, which each KV cache group
        has of its own. Returns the numbers of the passes."""
        first = len(self.digests)
        numbers = np.arange(first, first + len(digests))
        self.digests += digests
        self.is_good += [True] * len(digests)
        self.weights += [weights] * len(digests)
        for of_group in places:
            self.passes[of_group] = numbers
        return numbers

    def mark_bad(self, passes: np.ndarray) -> None:
        """These passes read KV of other tokens, or of none."""
        for number in passes.tolist():
            self.is_good[number] = False

    def lose(self, block_id: int) -> None:
        """A load that should fill the block failed."""
        self.passes[block_id * self.block_size : (block_id + 1) * self.block_size] = GARBAGE

    def is_of(self, places: np.ndarray, digests: Sequence[int]) -> bool:
        """Whether the places have the KV of the tokens with these digests, and of no weights from
        before a reset."""
        return all(
            number >= self.first_valid and self.is_good[number] and self.digests[number] == digest
            for number, digest in zip(self.passes[places].tolist(), digests, strict=True)
        )


def make_rows(passes: np.ndarray, first_position: int) -> np.ndarray:
    """(n, 2 layers, 2 experts) uint16: the rows of consecutive tokens."""
    positions = np.arange(first_position, first_position + len(passes))
    columns = (passes & 0xFFFF, passes >> 16, positions, positions)
    return np.stack(columns, axis=1).astype(np.uint16).reshape(-1, 2, 2)


def read_rows(rows: np.ndarray) -> np.ndarray:
    """The passes that the rows are of."""
    return rows[:, 0, 0].astype(np.int64) | rows[:, 0, 1].astype(np.int64) << 16
