# SPDX-License-Identifier: Apache-2.0
"""Runs a client on recorded answers, in the client's environment:

    python with_<client>.py RECORDS OUT

Writes OUT/<behaviour>.npz for each record of RECORDS. It has for each sample `tokens<i>`, (T,), and
`routes<i>`, (T, L, K) int64: the experts that the client makes a trainer take, `OWN` where the
trainer selects itself. Where the client fails, OUT/<behaviour>.error has its traceback.
"""

from __future__ import annotations

import base64
import io
import json
import sys
import textwrap
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from examples.client import Completion, join

OWN = -1
# Sizes of prompts, which fill several chunks and blocks, and of what is said between two turns.
PROMPT, BETWEEN, TURNS = 131, 11, 4
# A client's own engine.
ENGINE = {
    "block_size": 32,
    "max_num_batched_tokens": 64,
    "kv_cache_memory_bytes": 64 << 20,
}
Routes = npt.NDArray[np.int64]


@dataclass
class Turn:
    """One request and its answer.

    Attributes:
        prompt: P ids, as sent.
        start: `routed_experts_prompt_start`, as sent.
        chunks: the answer's JSON; of a stream, those of its events in their order.
    """

    prompt: list[int]
    start: int
    chunks: list[dict[str, Any]]

    @property
    def sequence(self) -> list[int]:
        """Prompt and returned tokens of the first choice."""
        parts = [c for chunk in self.chunks for c in chunk["choices"] if c["index"] == 0]
        return [*self.prompt, *(t for part in parts for t in part["token_ids"] or ())]

    @property
    def finish_reason(self) -> str | None:
        return self.chunks[-1]["choices"][-1]["finish_reason"]

    @property
    def aborted_at_once(self) -> bool:
        """Whether the answer has no tokens, and so no rows."""
        return self.sequence == self.prompt

    def completions(self) -> list[Completion]:
        return join(self.prompt, self.chunks)


def write_record(folder: Path, behaviour: str, turns: Sequence[Turn]) -> None:
    """Write the conversation of a behaviour as JSON."""
    folder.mkdir(parents=True, exist_ok=True)
    document = {"turns": [asdict(turn) for turn in turns]}
    (folder / f"{behaviour}.json").write_text(json.dumps(document))


def read_record(file: Path) -> list[Turn]:
    return [Turn(**turn) for turn in json.loads(file.read_text())["turns"]]


def make_turn(prompt: Sequence[int], answers: Sequence[tuple[Sequence[int], Any, str]]) -> Turn:
    """A request to a client's own engine.

    Args:
        prompt: P ids.
        answers: its choices: returned ids, the rows or None, and the finish reason.
    """
    choices = []
    for index, (token_ids, rows, finish_reason) in enumerate(answers):
        choice = {"index": index, "token_ids": list(token_ids), "finish_reason": finish_reason}
        if rows is not None:
            choice |= {
                "routed_experts": encode(rows),
                "routed_experts_start": 0,
                "moe_layers": rows.any(axis=(0, 2)).nonzero()[0].tolist(),
                "num_prompt_tokens": len(prompt),
            }
        choices.append(choice)
    return Turn(list(prompt), 0, [{"choices": choices}])


# Sends a prompt, and optionally its start and sampling parameters; a prompt of a size.
Send = Callable[..., Turn]
Say = Callable[[int], Any]


def one_turn(send: Send, say: Say) -> Iterator[Turn]:
    yield send(say(PROMPT))


def several_turns(send: Send, say: Say, resent: bool = False) -> Iterator[Turn]:
    """Each turn asks for the rows behind those of the turn before, whose last token had none, or
    for all rows."""
    said = say(PROMPT)
    start = 0
    for _ in range(TURNS):
        yield (turn := send(said, start))
        start = 0 if resent else len(turn.sequence) - 1
        said = turn.sequence + say(BETWEEN)


def several_choices(send: Send, say: Say) -> Iterator[Turn]:
    yield send(say(PROMPT), n=4, temperature=1.0, seed=7)


def prefix_hit(send: Send, say: Say) -> Iterator[Turn]:
    prompt = say(PROMPT)
    send(prompt)
    yield send(prompt + say(BETWEEN))


BEHAVIOURS: dict[str, Callable[[Send, Say], Iterator[Turn]]] = {
    "one turn": one_turn,
    "several turns": several_turns,
    "several turns, resent": partial(several_turns, resent=True),
    "n > 1": several_choices,
    "prefix-cache hit": prefix_hit,
}


def encode(rows: Any) -> str:
    """As the server does: base64 of a `.npy`."""
    file = io.BytesIO()
    np.save(file, rows)
    return base64.b64encode(file.getvalue()).decode()


def indented_block(text: str | None) -> str:
    """The code of a docstring."""
    lines = [line for line in (text or "").splitlines() if line.startswith("    ") or not line]
    return textwrap.dedent("\n".join(lines))


def run_engine(roll_out: Callable[[str], Iterable[tuple[str, Iterable[Turn]]]]) -> None:
    """Record a client's own engine, in the server's environment:

        python engine_<client>.py CHECKPOINT RECORDS PACKAGES

    The packages are the client's, behind those of the environment. Writes a record for each
    behaviour, which `with_<client>.py` replays.

    Args:
        roll_out: from a checkpoint to behaviours and their turns. Imports the client.
    """
    checkpoint, records, packages = sys.argv[1:]
    sys.path.append(packages)
    for behaviour, turns in roll_out(checkpoint):
        write_record(Path(records), behaviour, list(turns))


def run(replay: Callable[[list[Turn]], Sequence[tuple[Sequence[int], Any]]]) -> None:
    """Replay every record.

    Args:
        replay: from the turns of a conversation to its samples, each as tokens and routes.
    """
    records, out = map(Path, sys.argv[1:])
    out.mkdir(parents=True, exist_ok=True)
    for file in sorted(records.glob("*.json")):
        try:
            samples = replay(read_record(file))
            arrays = {}
            for i, (tokens, routes) in enumerate(samples):
                arrays[f"tokens{i}"] = np.asarray(tokens, dtype=np.int64)
                arrays[f"routes{i}"] = np.asarray(routes, dtype=np.int64)
            np.savez(out / f"{file.stem}.npz", **arrays)
        except Exception:
            (out / f"{file.stem}.error").write_text(traceback.format_exc())
