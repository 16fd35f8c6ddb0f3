# SPDX-License-Identifier: Apache-2.0
"""Answers of a running patched server, recorded as files: what clients decode in environments of
their own, into which vLLM cannot be installed beside them.

A record is a JSON document: a conversation of one or several turns, as it was sent and answered.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from examples.client import PATH
from harness.checkpoint import make_checkpoint
from harness.server import Server, ServerError
from tests.clients import driving
from tests.clients.driving import LENGTH, LONG, PROMPT, SETTINGS, Turn, try_record, write_error

# The line that is installed.
LINE = "v" + version("vllm").partition("+")[0]

ARGUMENTS = [
    "--enable-return-routed-experts",
    f"--max-num-batched-tokens={SETTINGS['max_num_batched_tokens']}",
    "--enforce-eager",
]
# Requests that run at once: `harness.server.ARGUMENTS`.
MOST = 8
ABORTED = {"max_tokens": LONG, "temperature": 1.0}
# /pause and /resume.
ENVIRONMENT = {"VLLM_SERVER_DEV_MODE": "1"}
HITS, GENERATED = "vllm:prefix_cache_hits_total", "vllm:generation_tokens_total"


@dataclass(frozen=True)
class Engine:
    """A server as `driving.BEHAVIOURS` ask it."""

    server: Server
    rng: np.random.Generator

    def say(self, length: int) -> list[int]:
        return self.rng.integers(4, 700, length).tolist()

    def send(
        self, prompt: list[int], start: int = 0, stream: bool = False, **sampling: Any
    ) -> Turn:
        """Ask for rows, greedy unless `sampling` says otherwise."""
        defaults = {"temperature": 0.0, "ignore_eos": True, "max_tokens": 9, "logprobs": 1}
        body = {
            "token_ids": prompt,
            "sampling_params": {**defaults, **sampling, "routed_experts_prompt_start": start},
            "stream": stream,
        }
        reply = httpx.post(self.server.url + PATH, json=body, timeout=120, trust_env=False)
        reply.raise_for_status()
        if not stream:
            return Turn(prompt, start, [reply.json()])
        events = [line.removeprefix("data: ") for line in reply.text.splitlines() if line]
        assert events.pop() == "[DONE]"
        return Turn(prompt, start, [json.loads(event) for event in events])

    def wait_for(self, metric: str, value: float, asked: Future[Turn]) -> None:
        """Wait until a metric is at least a value, while a request runs."""
        while (self.server.metric(metric) or 0) < value:
            assert not asked.done(), f"the request ended before {metric} was {value}"
            time.sleep(0.01)

    def abort(self, prompt: list[int], metric: str, value: float) -> Turn:
        """Ask for a long answer, and abort all requests once a metric has a value."""
        with ThreadPoolExecutor(1) as background:
            asked = background.submit(self.send, prompt, **ABORTED)
            self.wait_for(metric, value, asked)
            self.server.post("/pause?mode=abort", {})
            turn = asked.result()
        self.server.post("/resume", {})
        assert turn.finish_reason == "abort"
        return turn


def streamed(engine: Engine) -> Iterator[Turn]:
    turn = engine.send(engine.say(PROMPT), stream=True)
    assert len(turn.chunks) > 2
    yield turn


def prefix_hit(engine: Engine) -> Iterator[Turn]:
    hits = engine.server.metric(HITS) or 0
    yield from driving.prefix_hit(engine)
    assert (engine.server.metric(HITS) or 0) > hits


def aborted(engine: Engine) -> Iterator[Turn]:
    """Aborted after some tokens, as before a weight update, and resumed."""
    before = engine.server.metric(GENERATED) or 0
    turn = engine.abort(engine.say(PROMPT), GENERATED, before + 8)
    assert not turn.aborted_at_once
    yield turn
    yield engine.send(turn.sequence)


def aborted_at_once(engine: Engine) -> Iterator[Turn]:
    """Aborted while it waits for others, before its first token, and sent again."""
    with ThreadPoolExecutor(1) as background:
        others = background.submit(engine.send, engine.say(PROMPT), n=MOST, **ABORTED)
        engine.wait_for("vllm:num_requests_running", MOST, others)
        turn = engine.abort(engine.say(PROMPT), "vllm:num_requests_waiting", 1)
        others.result()
    assert turn.aborted_at_once
    yield turn
    yield engine.send(turn.prompt)


# A small family for each form of rows, its checkpoint, and the behaviours that are recorded.
MODELS: dict[str, tuple[dict[str, Any], dict[str, Callable[[Engine], Iterator[Turn]]]]] = {
    "dense-first": (
        {"mlp_only_layers": [0], "max_position_embeddings": LENGTH},
        {
            **driving.BEHAVIOURS,
            "stream": streamed,
            "abort and resume": aborted,
            "abort without tokens": aborted_at_once,
            "prefix-cache hit": prefix_hit,
        },
    ),
    "smaller-top-k": ({"family": "hunyuan_v1_moe"}, {"smaller top-k": driving.one_turn}),
    "300-experts": (
        {"num_experts": 300, "moe_intermediate_size": 32, "num_hidden_layers": 2},
        {"300 experts": driving.one_turn},
    ),
}
BEHAVIOURS = {name: model for model, (_, asked) in MODELS.items() for name in asked}


def record(model: str, folder: Path, records: Path) -> Path:
    """Serve a model of `MODELS`, and record its behaviours or their errors as JSON files. Returns
    the checkpoint."""
    settings, behaviours = MODELS[model]
    checkpoint = make_checkpoint(folder / "checkpoint", **settings)
    log = folder / "server.log"
    arguments = [*ARGUMENTS, f"--max-model-len={settings.get('max_position_embeddings', 1024)}"]
    try:
        with Server(checkpoint, log, arguments, ENVIRONMENT, line=LINE) as server:
            engine = Engine(server, np.random.default_rng(len(model)))
            for name, behaviour in behaviours.items():
                try_record(records, name, behaviour(engine))
    except ServerError as error:
        for name in behaviours:
            write_error(records, name, f"the server of {model} did not start: {error}")
    return checkpoint
