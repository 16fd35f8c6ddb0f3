# SPDX-License-Identifier: Apache-2.0
"""Weights change during a pause, over HTTP, with each mode of `/pause`. The oracle is
`transformers` with the weights that computed the rows."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from examples.client import Completion, generate
from harness import oracle
from harness.server import Server
from tests.behaviour.conftest import assert_true_completion, random_prompt
from tests.behaviour.test_weights import assert_agree, log_probs

pytestmark = pytest.mark.slow
PROMPT = random_prompt(920, 70)
SAMPLING: dict[str, Any] = {
    "temperature": 0.0,
    "ignore_eos": True,
    "max_tokens": 150,
    "logprobs": 1,
}


@pytest.fixture(scope="module")
def other(checkpoint: Callable[..., Path]) -> Path:
    """Other weights of the same model."""
    return checkpoint(seed=1, mlp_only_layers=[1])


@pytest.fixture(scope="module")
def serving(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    arguments = ["--enable-return-routed-experts", "--enable-prefix-caching", "--enforce-eager"]
    log = tmp_path_factory.mktemp("server") / "server.log"
    with Server(model, log, arguments, {"VLLM_SERVER_DEV_MODE": "1"}) as server:
        yield server


@pytest.fixture
def server(serving: Server, model: Path) -> Server:
    """With the weights of `model`, and nothing cached."""
    serving.post("/pause?mode=abort", {})
    load(serving, model)
    serving.post("/resume", {})
    return serving


def load(server: Server, weights: Path) -> None:
    body = {"method": "reload_weights", "kwargs": {"weights_path": str(weights)}}
    server.post("/collective_rpc", body)


def change(server: Server, pause: str, weights: Path) -> tuple[Completion, Completion]:
    """Pause while a request generates, change the weights, and resume. Returns the answer of this
    request, and the answer of a later one."""

    def sampled() -> float:
        return server.metric("vllm:generation_tokens_total") or 0

    def ask() -> Completion:
        (completion,) = generate(server.url, PROMPT, SAMPLING, stream=True)
        return completion

    before = sampled()
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(ask)
        while sampled() < before + 5:
            assert not running.done()
            time.sleep(0.02)
        server.post(f"/pause?{pause}", {})
        load(server, weights)
        server.post("/resume", {})
    return running.result(), ask()


def test_aborted_request_has_rows_of_the_old_weights_and_the_next_one_of_the_new(
    server: Server, model: Path, other: Path
) -> None:
    aborted, later = change(server, "mode=abort", other)
    # v0.20.2 sends no chunk without a new token.
    assert aborted.finish_reason in ("abort", None)
    assert len(PROMPT) < len(aborted.rows) < len(PROMPT) + SAMPLING["max_tokens"] - 1
    assert_agree(aborted.rows, oracle.route(model, [*PROMPT, *aborted.token_ids]))
    assert_true_completion(other, later)


def test_request_that_a_pause_waits_for_has_rows_of_the_old_weights(
    server: Server, model: Path, other: Path
) -> None:
    waited_for, later = change(server, "mode=wait", other)
    assert len(waited_for.token_ids) == SAMPLING["max_tokens"]
    assert_true_completion(model, waited_for)
    assert_true_completion(other, later)


def test_rows_and_log_probs_of_a_kept_request_change_at_the_same_token(
    server: Server, model: Path, other: Path
) -> None:
    """The new weights go on with the old KV."""
    kept, _ = change(server, "mode=keep&clear_cache=false", other)
    tokens = [*PROMPT, *kept.token_ids]
    first = oracle.compare(kept.rows, oracle.route(model, tokens)).disagreements[0].position
    # The pass that samples a token gives its log-prob, and the row of the token before it.
    old = log_probs(model, tokens)[len(PROMPT) - 1 :]
    differ = np.abs(np.array(kept.logprobs) - old) > 1e-3
    changed = len(PROMPT) - 1 + int(differ.argmax())
    assert differ.any()
    assert len(PROMPT) + 3 < changed <= first
    assert_agree(
        kept.rows, oracle.route_in_turns((model, tokens[:changed]), (other, tokens[changed:]))
    )
