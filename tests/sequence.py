# SPDX-License-Identifier: Apache-2.0
"""Tokens and rows of a model without a KV cache, for the workers of every line's property test.

A row is a function of the whole sequence up to its token and of the weights, so that a row of
another position, request, draft or weight update is never right by chance. The next token is a
function of the sequence, so that drafts can be right.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from itertools import accumulate

import numpy as np

VOCABULARY = 50


def _hash(tokens: Sequence[int]) -> int:
    return zlib.crc32(np.asarray(tokens, dtype=np.int32).tobytes())


def prefix_digests(tokens: Iterable[int]) -> list[int]:
    """Of each token: what tells the sequence up to it from others."""
    digests = accumulate(tokens, lambda d, t: zlib.crc32(t.to_bytes(4, "little"), d), initial=0)
    return [*digests][1:]


def next_token(tokens: Sequence[int]) -> int:
    """What the model samples after `tokens`."""
    return _hash(tokens) % VOCABULARY


def propose(tokens: Sequence[int], is_right: Iterable[bool]) -> list[int]:
    """Drafts of what follows `tokens`, each one right or wrong."""
    tokens, drafts = list(tokens), []
    for right in is_right:
        token = next_token(tokens)
        drafts.append(token if right else (token + 1) % VOCABULARY)
        tokens.append(drafts[-1])
    return drafts


def true_row(tokens: Sequence[int], position: int, weights: int) -> np.ndarray:
    """(2 layers, 2 experts) uint16: the row of one position, told by its whole prefix."""
    value = _hash(tokens[: position + 1])
    return np.array([[value & 0xFFFF, value >> 16], [position, weights]], dtype=np.uint16)
