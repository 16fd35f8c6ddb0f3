# SPDX-License-Identifier: Apache-2.0
"""Answers of a running patched server, recorded as files: what clients decode in environments of
their own, into which vLLM cannot be installed beside them.

A record is a JSON document: a conversation of one or several turns, as it was sent and answered.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from harness import oracle
from harness.checkpoint import make_checkpoint
from harness.lines import LINES
from harness.server import Server
from tests.clients.driving import Turn, write_record

PATH = "/inference/v1/generate"

# The line that is installed.
LINE = "v" + version("vllm").partition("+")[0]

# A small family for each form of rows, and its checkpoint.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "dense-first": ("qwen3_moe", {"mlp_only_layers": [0]}),
    "smaller-top-k": ("hunyuan_v1_moe", {}),
    "300-experts": (
        "qwen3_moe",
        {"num_experts": 300, "moe_intermediate_size": 32, "num_hidden_layers": 2},
    ),
}

CHUNK = 64
ARGUMENTS = [
    "--enable-return-routed-experts",
    f"--max-num-batched-tokens={CHUNK}",
    "--enforce-eager",
]
# /pause and /resume.
ENVIRONMENT = {"VLLM_SERVER_DEV_MODE": "1"}
# Tokens between two turns: what a tool or a user said.
BETWEEN = 11
TURNS = 4


def make_body(
    prompt: Sequence[int], start: int = 0, stream: bool = False, **sampling: Any
) -> dict[str, Any]:
    """A request for rows, greedy unless `sampling` says otherwise."""
    defaults = {"temperature": 0.0, "ignore_eos": True, "max_tokens": 9, "logprobs": 1}
    return {
        "token_ids": list(prompt),
        "sampling_params": {**defaults, **sampling, "routed_experts_prompt_start": start},
        "stream": stream,
    }


def send(
    server: Server, prompt: Sequence[int], start: int = 0, stream: bool = False, **sampling: Any
) -> Turn:
    """Ask for rows.

    Args:
        server: that answers.
        prompt: token ids.
        start: `routed_experts_prompt_start`.
        stream: whether the answer comes in events.
        **sampling: other fields of `sampling_params`.
    """
    body = make_body(prompt, start, stream, **sampling)
    reply = httpx.post(server.url + PATH, json=body, timeout=120, trust_env=False)
    reply.raise_for_status()
    if not stream:
        return Turn(list(prompt), start, [reply.json()])
    events = [line.removeprefix("data: ") for line in reply.text.splitlines() if line]
    assert events.pop() == "[DONE]"
    return Turn(list(prompt), start, [json.loads(event) for event in events])


def post(server: Server, path: str) -> None:
    httpx.post(server.url + path, timeout=60, trust_env=False).raise_for_status()


def conversation(
    server: Server, prompts: Iterator[list[int]], next_start: Callable[[int], int]
) -> Iterator[Turn]:
    """Several turns: each prompt is all that was said, and new tokens.

    Args:
        server: that answers.
        prompts: for the first turn's prompt, and what comes between turns.
        next_start: from the number of tokens of all earlier turns, what a turn sends as its start.
    """
    said: list[int] = []
    for _ in range(TURNS):
        start = next_start(len(said))
        said = [*said, *(next(prompts) if not said else next(prompts)[:BETWEEN])]
        turn = send(server, said, start)
        said = turn.sequence
        yield turn


def several_turns(server: Server, prompts: Iterator[list[int]]) -> Iterator[Turn]:
    """Each turn asks for the rows behind those of the turn before: its last token had none."""
    return conversation(server, prompts, lambda said: max(0, said - 1))


def several_turns_resent(server: Server, prompts: Iterator[list[int]]) -> Iterator[Turn]:
    """Each turn asks for all rows."""
    return conversation(server, prompts, lambda said: 0)


def one_turn(server: Server, prompts: Iterator[list[int]]) -> Iterator[Turn]:
    yield send(server, next(prompts))


def several_choices(server: Server, prompts: Iterator[list[int]]) -> Iterator[Turn]:
    yield send(server, next(prompts), n=4, temperature=1.0, seed=7)


def streamed(server: Server, prompts: Iterator[list[int]]) -> Iterator[Turn]:
    turn = send(server, next(prompts), stream=True)
    assert len(turn.chunks) > 2
    yield turn


def prefix_hit(server: Server, prompts: Iterator[list[int]]) -> Iterator[Turn]:
    prompt = next(prompts)
    send(server, prompt)
    hits = server.metric("vllm:prefix_cache_hits_total")
    turn = send(server, [*prompt, *next(prompts)[:BETWEEN]])
    assert hits is not None
    assert server.metric("vllm:prefix_cache_hits_total") > hits
    yield turn


def aborted(server: Server, prompts: Iterator[list[int]]) -> Iterator[Turn]:
    """Aborted after some tokens, as before a weight update, and resumed."""
    # On a busy machine the abort may come too late, or before the first token.
    for _ in range(8):
        turn = abort_midway(server, next(prompts), next(prompts))
        if turn.finish_reason == "abort" and 0 < len(turn.sequence) - len(turn.prompt) < 200:
            yield turn
            yield send(server, turn.sequence)
            return
    raise AssertionError(f"no abort between tokens; the last one ended by {turn.finish_reason}")


def abort_midway(server: Server, prompt: list[int], other: list[int]) -> Turn:
    body = make_body(other, stream=True, max_tokens=700)
    with ThreadPoolExecutor(1) as background:
        asked = background.submit(send, server, prompt, max_tokens=700)
        # A stream beside it tells when it has tokens.
        with httpx.stream(
            "POST", server.url + PATH, json=body, timeout=120, trust_env=False
        ) as events:
            for _ in zip(range(8), events.iter_lines(), strict=False):
                pass
            # Again, if the request came later than the first pause: it would wait for ever.
            post(server, "/pause?mode=abort")
            while not asked.done():
                time.sleep(0.1)
                post(server, "/pause?mode=abort")
        turn = asked.result()
    post(server, "/resume")
    return turn


def aborted_at_once(server: Server, prompts: Iterator[list[int]]) -> Iterator[Turn]:
    """Aborted before its first token, and resumed."""
    prompt = next(prompts)
    post(server, "/pause?mode=abort")
    with ThreadPoolExecutor(1) as background:
        asked = background.submit(send, server, prompt)
        # It waits while the engine is paused. Pausing again aborts it, once it has arrived.
        while not asked.done():
            time.sleep(0.1)
            post(server, "/pause?mode=abort")
        turn = asked.result()
    post(server, "/resume")
    assert turn.finish_reason == "abort"
    assert turn.sequence == prompt
    yield turn
    yield send(server, prompt)


# What is recorded: the model, and how it is asked.
BEHAVIOURS: dict[str, tuple[str, Callable[[Server, Iterator[list[int]]], Iterator[Turn]]]] = {
    "one turn": ("dense-first", one_turn),
    "several turns": ("dense-first", several_turns),
    "several turns, resent": ("dense-first", several_turns_resent),
    "n > 1": ("dense-first", several_choices),
    "stream": ("dense-first", streamed),
    "abort and resume": ("dense-first", aborted),
    "abort without tokens": ("dense-first", aborted_at_once),
    "prefix-cache hit": ("dense-first", prefix_hit),
    "smaller top-k": ("smaller-top-k", one_turn),
    "300 experts": ("300-experts", one_turn),
}

# By line: what it does not do yet, with the reason.
NOT_YET: dict[str, dict[str, str]] = {
    "v0.33.0": {
        "abort without tokens": "a paused server of this line answers 503: no request waits for it",
        "smaller top-k": "the `transformers` of this line has no such model of our families",
    }
}


def recorded(model: str) -> list[str]:
    """The behaviours of a model on this line."""
    not_yet = NOT_YET.get(LINE, {})
    return [name for name, (of, _) in BEHAVIOURS.items() if of == model and name not in not_yet]


def record(model: str, folder: Path, records: Path) -> Path:
    """Serve a model and record its behaviours.

    Args:
        model: key of `MODELS`.
        folder: gets `checkpoint` and `server.log`.
        records: gets a JSON file for each behaviour.

    Returns:
        The checkpoint.
    """
    family, overrides = MODELS[model]
    checkpoint = make_checkpoint(folder / "checkpoint", family, **overrides)
    rng = np.random.default_rng(len(model))
    prompts = iter(lambda: [int(t) for t in rng.integers(4, 700, 2 * CHUNK + 3)], None)
    log = folder / "server.log"
    with Server(checkpoint, log, ARGUMENTS, ENVIRONMENT, line=LINE) as server:
        for behaviour in recorded(model):
            turns = list(BEHAVIOURS[behaviour][1](server, prompts))
            if not LINES[LINE].states_place:
                state_place(turns, checkpoint)
            write_record(records, behaviour, turns)
    return checkpoint


def state_place(turns: Sequence[Turn], checkpoint: Path) -> None:
    """Add what answers of a line do not state, and a caller knows by the request and the model."""
    moe_layers = list(oracle.route(checkpoint, turns[0].prompt).layers)
    for turn in turns:
        for choice in (c for chunk in turn.chunks for c in chunk["choices"]):
            if choice.get("routed_experts") is not None:
                choice["routed_experts_start"] = turn.start
                choice["num_prompt_tokens"] = len(turn.prompt)
                choice["moe_layers"] = moe_layers
