# SPDX-License-Identifier: Apache-2.0
"""Answers of a running patched server, recorded as files: what clients decode in environments of
their own, into which vLLM cannot be installed beside them.

A record is a JSON document: a conversation of one or several turns, as it was sent and answered.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from examples.client import PATH
from harness.checkpoint import make_checkpoint
from harness.server import Server
from tests.clients import driving
from tests.clients.driving import ENGINE, PROMPT, Say, Turn, write_record

# The line that is installed.
LINE = "v" + version("vllm").partition("+")[0]

ARGUMENTS = [
    "--enable-return-routed-experts",
    f"--max-num-batched-tokens={ENGINE['max_num_batched_tokens']}",
    "--enforce-eager",
]
# Requests that run at once: `harness.server.ARGUMENTS`.
MOST = 8
# Of a request that is aborted. It has some seconds to run.
LONG = {"max_tokens": 700, "temperature": 1.0}
# /pause and /resume.
ENVIRONMENT = {"VLLM_SERVER_DEV_MODE": "1"}
HITS = "vllm:prefix_cache_hits_total"


def send(
    server: Server, prompt: list[int], start: int = 0, stream: bool = False, **sampling: Any
) -> Turn:
    """Ask for rows, greedy unless `sampling` says otherwise."""
    defaults = {"temperature": 0.0, "ignore_eos": True, "max_tokens": 9, "logprobs": 1}
    body = {
        "token_ids": prompt,
        "sampling_params": {**defaults, **sampling, "routed_experts_prompt_start": start},
        "stream": stream,
    }
    reply = httpx.post(server.url + PATH, json=body, timeout=120, trust_env=False)
    reply.raise_for_status()
    if not stream:
        return Turn(prompt, start, [reply.json()])
    events = [line.removeprefix("data: ") for line in reply.text.splitlines() if line]
    assert events.pop() == "[DONE]"
    return Turn(prompt, start, [json.loads(event) for event in events])


def streamed(server: Server, say: Say) -> Iterator[Turn]:
    turn = send(server, say(PROMPT), stream=True)
    assert len(turn.chunks) > 2
    yield turn


def aborted(server: Server, say: Say) -> Iterator[Turn]:
    """Aborted after some tokens, as before a weight update, and resumed."""
    generated = "vllm:generation_tokens_total"
    turn = abort(server, say(PROMPT), generated, (server.metric(generated) or 0) + 8)
    assert len(turn.sequence) > len(turn.prompt)
    yield turn
    yield send(server, turn.sequence)


def aborted_at_once(server: Server, say: Say) -> Iterator[Turn]:
    """Aborted while it waits for others, before its first token, and sent again."""
    with ThreadPoolExecutor(1) as background:
        others = background.submit(send, server, say(PROMPT), n=MOST, **LONG)
        wait_for(server, "vllm:num_requests_running", MOST)
        turn = abort(server, say(PROMPT), "vllm:num_requests_waiting", 1)
        others.result()
    assert turn.aborted_at_once
    yield turn
    yield send(server, turn.prompt)


def abort(server: Server, prompt: list[int], metric: str, value: float) -> Turn:
    """Ask for a long answer, and abort all requests once a metric has a value."""
    with ThreadPoolExecutor(1) as background:
        asked = background.submit(send, server, prompt, **LONG)
        wait_for(server, metric, value)
        server.post("/pause?mode=abort", {})
        turn = asked.result()
    server.post("/resume", {})
    assert turn.finish_reason == "abort"
    return turn


def wait_for(server: Server, metric: str, value: float) -> None:
    """Wait until a metric is at least a value."""
    for _ in range(3000):
        if (server.metric(metric) or 0) >= value:
            return
        time.sleep(0.01)
    raise AssertionError(f"{metric} is not {value} yet")


def of_server(
    behaviour: Callable[[driving.Send, Say], Iterator[Turn]],
) -> Callable[[Server, Say], Iterator[Turn]]:
    return lambda server, say: behaviour(partial(send, server), say)


# A small family for each form of rows, its checkpoint, and the behaviours that are recorded.
Behaviours = dict[str, Callable[[Server, Say], Iterator[Turn]]]
MODELS: dict[str, tuple[dict[str, Any], Behaviours]] = {
    "dense-first": (
        {"mlp_only_layers": [0]},
        {
            **{name: of_server(behaviour) for name, behaviour in driving.BEHAVIOURS.items()},
            "stream": streamed,
            "abort and resume": aborted,
            "abort without tokens": aborted_at_once,
        },
    ),
    "smaller-top-k": ({"family": "hunyuan_v1_moe"}, {"smaller top-k": of_server(driving.one_turn)}),
    "300-experts": (
        {"num_experts": 300, "moe_intermediate_size": 32, "num_hidden_layers": 2},
        {"300 experts": of_server(driving.one_turn)},
    ),
}
BEHAVIOURS = {name: model for model, (_, asked) in MODELS.items() for name in asked}


def record(model: str, folder: Path, records: Path) -> Path:
    """Serve a model and record its behaviours.

    Args:
        model: key of `MODELS`.
        folder: gets `checkpoint` and `server.log`.
        records: gets a JSON file for each behaviour.

    Returns:
        The checkpoint.
    """
    settings, behaviours = MODELS[model]
    checkpoint = make_checkpoint(folder / "checkpoint", **settings)
    rng = np.random.default_rng(len(model))

    def say(length: int) -> list[int]:
        return rng.integers(4, 700, length).tolist()

    log = folder / "server.log"
    with Server(checkpoint, log, ARGUMENTS, ENVIRONMENT, line=LINE) as server:
        for name, behaviour in behaviours.items():
            hits = server.metric(HITS) or 0
            turns = list(behaviour(server, say))
            assert name != "prefix-cache hit" or (server.metric(HITS) or 0) > hits
            write_record(records, name, turns)
    return checkpoint
