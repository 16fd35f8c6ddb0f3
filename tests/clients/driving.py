# SPDX-License-Identifier: Apache-2.0
"""Shared by the programs of all environments: turns, records, and how clients are asked."""

from __future__ import annotations

import base64
import io
import json
import textwrap
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from examples.client import Completion, join

OWN = -1
# Sizes of prompts, which fill several chunks and blocks, and of what is said between two turns.
PROMPT = 131
BETWEEN = 11
TURNS = 4
# Settings of an engine.
SETTINGS = {"block_size": 32, "max_num_batched_tokens": 64, "kv_cache_memory_bytes": 64 << 20}
# Tokens of a model that aborts are tried on, and of an answer that is aborted: it cannot end first.
LENGTH, LONG = 32_768, 32_000


@dataclass
class Turn:
    """One request and its answer."""

    prompt: list[int]
    start: int  # `routed_experts_prompt_start`, as sent
    chunks: list[dict[str, Any]]  # the answer's JSON; of a stream, that of its events

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
    (folder / f"{behaviour}.json").write_text(json.dumps([asdict(turn) for turn in turns]))


def try_record(folder: Path, behaviour: str, turns: Iterator[Turn]) -> None:
    """Write the record of a behaviour, or the traceback where it fails: other behaviours go on."""
    try:
        write_record(folder, behaviour, list(turns))
    except Exception:
        write_error(folder, behaviour, traceback.format_exc())


def write_error(folder: Path, behaviour: str, why: str) -> None:
    """Write why a behaviour has no record, or no samples."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{behaviour}.error").write_text(why)


def refuse_error(folder: Path, behaviour: str) -> None:
    """Raise an AssertionError if a behaviour has an error instead of a record or of samples."""
    error = folder / f"{behaviour}.error"
    assert not error.exists(), error.read_text()


def read_record(file: Path) -> list[Turn]:
    return [Turn(**turn) for turn in json.loads(file.read_text())]


def make_turn(
    prompt: Sequence[int], answers: Sequence[tuple[Sequence[int], Any, str]], start: int = 0
) -> Turn:
    """A request to a client's own engine. `answers` are returned ids, their rows from `start` on,
    and the finish reason of each choice."""
    choices = [
        {
            "index": index,
            "token_ids": list(token_ids),
            "finish_reason": finish_reason,
            "routed_experts": encode(rows),
            "routed_experts_start": start,
            "moe_layers": rows.any(axis=(0, 2)).nonzero()[0].tolist(),
            "num_prompt_tokens": len(prompt),
        }
        for index, (token_ids, rows, finish_reason) in enumerate(answers)
    ]
    return Turn(list(prompt), start, [{"choices": choices}])


class Engine(Protocol):
    """What is asked: a server or a client's own engine."""

    def say(self, length: int) -> Any:
        """Something new to say, of `length` tokens."""

    def send(self, prompt: Any, start: int = 0, **sampling: Any) -> Turn: ...


def one_turn(engine: Engine) -> Iterator[Turn]:
    yield engine.send(engine.say(PROMPT))


def several_turns(engine: Engine, resent: bool = False) -> Iterator[Turn]:
    """Each turn asks for the rows behind those of the turn before, whose last token had none, or
    for all rows."""
    said = engine.say(PROMPT)
    start = 0
    for _ in range(TURNS):
        yield (turn := engine.send(said, start))
        start = 0 if resent else len(turn.sequence) - 1
        said = turn.sequence + engine.say(BETWEEN)


def several_choices(engine: Engine) -> Iterator[Turn]:
    yield engine.send(engine.say(PROMPT), n=4, temperature=1.0, seed=7)


def prefix_hit(engine: Engine) -> Iterator[Turn]:
    prompt = engine.say(PROMPT)
    engine.send(prompt)
    yield engine.send(prompt + engine.say(BETWEEN))


BEHAVIOURS: dict[str, Callable[[Any], Iterator[Turn]]] = {
    "one turn": one_turn,
    "several turns": several_turns,
    "several turns, resent": partial(several_turns, resent=True),
    "n > 1": several_choices,
    "prefix-cache hit": prefix_hit,
}


def encode(rows: Any, save: Callable[..., None] = np.save) -> str:
    """As the server does: base64 of a `.npy`."""
    file = io.BytesIO()
    save(file, rows)
    return base64.b64encode(file.getvalue()).decode()


def indented_block(text: str | None) -> str:
    """The code of a docstring."""
    lines = [line for line in (text or "").splitlines() if line.startswith("    ") or not line]
    return textwrap.dedent("\n".join(lines))
