# SPDX-License-Identifier: Apache-2.0
"""Clients that no package index has, by the rule that their source follows: from a turn, as
recorded, to the tokens of each choice and the rows that the client decodes.

Read in their source in August and September 2026; nothing of them runs here.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from tests.clients.driving import OWN, Routes, Turn

Rule = Callable[[Turn], Iterable[tuple[Sequence[int], Any]]]


def vime(turn: Turn) -> Iterable[tuple[Sequence[int], Any]]:
    """`/inference/v1/generate` as it is: base64 of a `.npy`, to int32."""
    for choice in turn.chunks[0]["choices"]:
        rows = np.load(io.BytesIO(base64.b64decode(choice["routed_experts"])))
        yield [*turn.prompt, *choice["token_ids"]], rows.astype(np.int32)


def nemo_rl(turn: Turn) -> Iterable[tuple[Sequence[int], Any]]:
    """In-process: int8, int16 or int32 by the number of experts, which the rows are cast to before
    torch sees them."""
    for completion in turn.completions():
        most = completion.rows.max()
        dtype = next(t for t in (np.int8, np.int16, np.int32) if most <= np.iinfo(t).max)
        yield (*completion.prompt, *completion.token_ids), completion.rows.astype(dtype)


def sglang(turn: Turn) -> Iterable[tuple[Sequence[int], Any]]:
    """SGLang's `/generate`, which vLLM does not speak: raw int32 in base64, which AReaL takes as
    (n - 1, L * K). Rows as SGLang would have sent them."""
    for completion in turn.completions():
        tokens = (*completion.prompt, *completion.token_ids)
        text = base64.b64encode(completion.rows.astype("<i4").tobytes())
        flat = np.frombuffer(base64.b64decode(text), np.int32).reshape(len(tokens) - 1, -1)
        yield tokens, flat.reshape(-1, *completion.rows.shape[1:])


def apply(rule: Rule, turns: list[Turn]) -> list[tuple[Sequence[int], Routes]]:
    """Tokens and routes (T, L, K) of each choice, `OWN` where the trainer selects itself.

    Turns and resumed requests send the whole sequence, so the last one has all rows: n - 1 for n
    tokens. An abort without tokens is skipped.
    """
    samples = []
    for tokens, rows in rule([turn for turn in turns if not turn.aborted_at_once][-1]):
        assert len(rows) == len(tokens) - 1, f"{len(rows)} rows for {len(tokens)} tokens"
        assert (rows >= 0).all()
        padding = ((0, 1), (0, 0), (0, 0))
        samples.append((tokens, np.pad(rows.astype(np.int64), padding, constant_values=OWN)))
    return samples
