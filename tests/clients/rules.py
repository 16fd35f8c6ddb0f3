# SPDX-License-Identifier: Apache-2.0
"""Clients that no package index has, by the rule that their source follows: from the turns of a
conversation, as recorded, to tokens and routes (T, L, K), `OWN` where the trainer selects itself.

Read in their source in August and September 2026; nothing of them runs here.
"""

from __future__ import annotations

import base64
import io
from typing import Any

import numpy as np

from examples.clients import prime_rl_answers
from tests.clients.driving import OWN, Routes, Turn

Sample = tuple[list[int], Routes]


def vime(turns: list[Turn]) -> list[Sample]:
    """`/inference/v1/generate` as it is: base64 of a `.npy` with n - 1 rows, to int32. Turns and
    resumed requests send the whole sequence; an abort without tokens is skipped."""
    turn = [turn for turn in turns if not turn.aborted_at_once][-1]
    return [
        behind(
            [*turn.prompt, *choice["token_ids"]],
            np.load(io.BytesIO(base64.b64decode(choice["routed_experts"]))),
            np.int32,
        )
        for choice in turn.chunks[0]["choices"]
    ]


def nemo_rl(turns: list[Turn]) -> list[Sample]:
    """In-process: int8, int16 or int32 by the number of experts, which the rows are cast to before
    torch sees them; rows that are missing are -1."""
    samples = []
    for completion in turns[-1].completions():
        most = int(completion.rows.max())
        dtype = next(t for t in (np.int8, np.int16, np.int32) if most <= np.iinfo(t).max)
        samples.append(behind([*completion.prompt, *completion.token_ids], completion.rows, dtype))
    return samples


def prime_rl(turns: list[Turn]) -> list[Sample]:
    """Fields data, shape, dtype and start; each turn starts at the last token of the one before,
    whose row it mends. The last row of all is copied."""
    routes: Any = None
    for turn in turns:
        (choice,) = prime_rl_answers.reencode(turn.chunks[0])["choices"]
        sent = choice["routed_experts"]
        rows = np.frombuffer(base64.b64decode(sent["data"]), sent["dtype"]).reshape(sent["shape"])
        earlier = rows[:0] if routes is None else routes[: sent["start"]]
        routes = np.concatenate([earlier, rows, rows[-1:]])
    return [(turns[-1].sequence, routes.astype(np.int64))]


def sglang(turns: list[Turn]) -> list[Sample]:
    """SGLang's `/generate`, which vLLM does not speak: n - 1 rows as raw int32 in base64, which
    AReaL takes as (n - 1, L * K). Rows as SGLang would have sent them."""
    samples = []
    for completion in turns[-1].completions():
        text = base64.b64encode(completion.rows.astype("<i4").tobytes())
        tokens = [*completion.prompt, *completion.token_ids]
        flat = np.frombuffer(base64.b64decode(text), np.int32).reshape(len(tokens) - 1, -1)
        rows = flat.reshape(len(flat), *completion.rows.shape[1:])
        samples.append(behind(tokens, rows, np.int32))
    return samples


def behind(tokens: list[int], rows: Any, dtype: Any) -> Sample:
    """Rows of all tokens but the last, which the trainer routes itself."""
    assert len(rows) == len(tokens) - 1, f"{len(rows)} rows for {len(tokens)} tokens"
    cast = rows.astype(dtype)
    assert (cast >= 0).all()
    return tokens, np.pad(cast.astype(np.int64), ((0, 1), (0, 0), (0, 0)), constant_values=OWN)
