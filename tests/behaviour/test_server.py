# SPDX-License-Identifier: Apache-2.0
"""`vllm serve`: /inference/v1/generate returns the rows of its tokens, also to silent requests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import torch
import transformers

from demos.replay import mismatch
from examples import client
from examples.client import Completion
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


def test_client_that_goes_away_disturbs_nobody(server: Server, model: Path) -> None:
    prompt = random_prompt(5, 100)
    sampling = {"temperature": 0.0, "ignore_eos": True, "max_tokens": 400}
    body = {"token_ids": prompt, "sampling_params": sampling, "stream": True}
    url = server.url + client.PATH
    with httpx.stream("POST", url, json=body, trust_env=False, timeout=120) as reply:
        next(reply.iter_lines())
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
