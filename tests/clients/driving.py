# SPDX-License-Identifier: Apache-2.0
"""Runs a client on recorded answers, in the client's environment:

    python with_<client>.py RECORDS OUT

Writes OUT/<behaviour>.npz for each record of RECORDS. It has for each sample `tokens<i>`, (T,), and
`routes<i>`, (T, L, K) int64: the experts that the client makes a trainer take, `OWN` where the
trainer selects itself. Where the client fails, OUT/<behaviour>.error has its traceback.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from examples.client import Completion, join
from examples.clients.turns import join_turns

OWN = -1
Routes = npt.NDArray[np.int64]


@dataclass
class Turn:
    """A recorded request and its answer: see `recorder.Turn`."""

    prompt: list[int]
    start: int
    chunks: list[dict[str, Any]]

    @property
    def aborted_at_once(self) -> bool:
        """Whether the answer has no tokens, and so no rows."""
        return not any(choice["token_ids"] for chunk in self.chunks for choice in chunk["choices"])

    def completions(self) -> list[Completion]:
        return join(self.prompt, self.chunks)


def whole(turns: Sequence[Turn]) -> list[Completion]:
    """The samples of a conversation: its choices, or its turns in one."""
    answered = [turn.completions() for turn in turns if not turn.aborted_at_once]
    return answered[0] if len(answered) == 1 else [join_turns([turn[0] for turn in answered])]


def run(replay: Callable[[list[Turn]], Sequence[tuple[Sequence[int], Any]]]) -> None:
    """Replay every record.

    Args:
        replay: from the turns of a conversation to its samples, each as tokens and routes.
    """
    records, out = map(Path, sys.argv[1:])
    out.mkdir(parents=True, exist_ok=True)
    for file in sorted(records.glob("*.json")):
        record = json.loads(file.read_text())
        try:
            samples = replay([Turn(**turn) for turn in record["turns"]])
            arrays = {}
            for i, (tokens, routes) in enumerate(samples):
                arrays[f"tokens{i}"] = np.asarray(tokens, dtype=np.int64)
                arrays[f"routes{i}"] = np.asarray(routes, dtype=np.int64)
            np.savez(out / f"{file.stem}.npz", **arrays)
        except Exception:
            (out / f"{file.stem}.error").write_text(traceback.format_exc())
