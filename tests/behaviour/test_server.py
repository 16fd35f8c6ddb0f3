# SPDX-License-Identifier: Apache-2.0
"""`vllm serve`: /inference/v1/generate returns the rows of its tokens, also to silent requests."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
import transformers

from demos.replay import mismatch
from examples import client
from examples.client import Completion, decode_rows
from harness.server import Server
from tests.behaviour.conftest import CHUNK, assert_rows, random_prompt


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    arguments = ["--enable-return-routed-experts", f"--max-num-batched-tokens={CHUNK}"]
    log = tmp_path_factory.mktemp("server") / "server.log"
    with Server(model, log=log, args=arguments) as server:
        yield server


def assert_true_answer(model: Path, answer: Completion) -> None:
    assert_rows(model, [*answer.prompt, *answer.token_ids], answer.rows, answer.start)


def request(server: Server, prompt: list[int], **sampling: Any) -> dict[str, Any]:
    return {
        "model": server.checkpoint,
        "token_ids": prompt,
        "sampling_params": {"temperature": 0.0, "ignore_eos": True, **sampling},
    }


def stream(server: Server, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The first choice of every chunk."""
    body = {**body, "stream": True}
    url = server.url + "/inference/v1/generate"
    with httpx.stream("POST", url, json=body, trust_env=False, timeout=120) as reply:
        for line in reply.iter_lines():
            data = line.removeprefix("data: ")
            if data and data != "[DONE]":
                yield json.loads(data)["choices"][0]


def test_chunks_of_a_stream_carry_the_rows_of_their_tokens(server: Server, model: Path) -> None:
    prompt = random_prompt(3, 2 * CHUNK + 9)
    token_ids: list[int] = []
    rows: list[np.ndarray] = []
    for chunk in stream(server, request(server, prompt, max_tokens=9)):
        assert chunk["routed_experts_start"] == sum(map(len, rows))
        assert chunk["num_prompt_tokens"] == len(prompt)
        token_ids += chunk["token_ids"]
        rows.append(decode_rows(chunk["routed_experts"]))
        assert sum(map(len, rows)) == len(prompt) + len(token_ids) - 1
    assert_rows(model, [*prompt, *token_ids], np.concatenate(rows))


def test_concurrent_requests_have_their_own_rows(server: Server, model: Path) -> None:
    rng = np.random.default_rng(4)
    lengths = [(int(p), int(o)) for p, o in rng.integers(1, (150, 20), size=(24, 2))]

    def ask(index: int) -> Completion:
        prompt_len, max_tokens = lengths[index]
        prompt = random_prompt(100 + index, prompt_len)
        return server.generate(prompt, max_tokens=max_tokens, ignore_eos=True)

    with ThreadPoolExecutor(12) as pool:
        for answer in pool.map(ask, range(len(lengths))):
            assert_true_answer(model, answer)


def test_client_that_goes_away_disturbs_nobody(server: Server, model: Path) -> None:
    prompt = random_prompt(5, 100)
    chunks = stream(server, request(server, prompt, max_tokens=400))
    next(chunks)
    chunks.close()  # type: ignore[attr-defined]
    # The same prefix: its blocks were filled by the request that went away.
    assert_true_answer(model, server.generate(prompt, max_tokens=5, ignore_eos=True))


@pytest.mark.parametrize("is_stream", [False, True])
def test_trainer_client_gets_true_rows_and_logprobs(
    server: Server, model: Path, is_stream: bool
) -> None:
    prompt = random_prompt(9, 60)
    params = {"n": 3, "temperature": 1.0, "seed": 5, "max_tokens": 9, "ignore_eos": True}
    completions = client.generate(
        server.url, prompt, {**params, "logprobs": 0}, start=10, stream=is_stream
    )
    assert len(completions) == 3
    for c in completions:
        assert_true_answer(model, c)
        assert c.start == 10
        assert c.finish_reason == "length"
    trainer = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    for replayed in (False, True):
        found = mismatch.measure(trainer, completions, replayed=replayed)
        assert len(found.deltas) == 27
        assert found.deltas == pytest.approx(0, abs=1e-4)


def test_trainer_client_tells_the_servers_refusal(server: Server) -> None:
    with pytest.raises(client.RoutedExpertsError, match=r"answered 400: .*integer from 0 to 20"):
        client.generate(server.url, random_prompt(10, 20), {"max_tokens": 2}, start=21)
