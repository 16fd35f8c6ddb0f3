# SPDX-License-Identifier: Apache-2.0
"""A prefill and a decode engine send KV with NIXL, from memory to memory over sockets, behind the
proxy: answers have the tokens and rows of one engine; an abort and a dead engine harm nobody."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from benchmarks.soak import soak
from examples import proxy
from examples.client import Completion, generate
from harness import disaggregated
from harness.server import Server, ServerError
from tests.behaviour.conftest import BLOCK, ask, random_prompt
from tests.behaviour.test_disaggregated_engines import Pair, assert_rows_of_one_engine

if TYPE_CHECKING:
    from vllm import LLM

pytestmark = pytest.mark.slow

LENGTHS = (2, BLOCK, BLOCK + 1, 3 * BLOCK + 5, 150)
PROMPTS = [random_prompt(i, length) for i, length in enumerate(LENGTHS)]
GREEDY = {"temperature": 0.0, "ignore_eos": True}


def engine(model: Path, folder: Path, name: str, role: str) -> Server:
    return Server(model, folder / f"{name}.log", *disaggregated.nixl(role))


@pytest.fixture(scope="module")
def pair(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    folder = tmp_path_factory.mktemp("nixl")
    servers = [
        engine(model, folder, role, role) for role in (disaggregated.PREFILL, disaggregated.DECODE)
    ]
    with ExitStack() as stack:
        with ThreadPoolExecutor() as pool:  # they take long to start
            started = [pool.submit(stack.enter_context, server) for server in servers]
        prefill, decode = (future.result() for future in started)
        yield Pair(prefill, decode, stack.enter_context(proxy.running(prefill.url, decode.url)))


def prefill(pair: Pair, prompt: list[int]) -> dict[str, Any]:
    """The request for the decode engine, after the prefill engine has answered."""
    body = {"token_ids": prompt, "sampling_params": {**GREEDY, "max_tokens": 5}}
    first = pair.prefill.post(proxy.GENERATE, proxy.prefill_body(proxy.GENERATE, body))
    return proxy.decode_body(body, first)


def test_joined_answers_have_the_tokens_and_rows_of_one_engine(
    pair: Pair, one_engine: LLM, model: Path
) -> None:
    def complete(number: int) -> Completion:
        sampling = {**GREEDY, "max_tokens": 9}
        (completion,) = generate(pair.url, PROMPTS[number], sampling, stream=number % 2 == 1)
        return completion

    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        completions = list(pool.map(complete, range(len(PROMPTS))))
    assert pair.decode.metric(disaggregated.RECEIVED) == sum(LENGTHS)
    assert pair.decode.metric("vllm:nixl_bytes_transferred_sum")
    outputs = ask(one_engine, *PROMPTS, max_tokens=9)
    for completion, output in zip(completions, outputs, strict=True):
        assert completion.token_ids == tuple(output.outputs[0].token_ids)
        assert_rows_of_one_engine(one_engine, model, completion)


def test_two_choices_are_refused(pair: Pair) -> None:
    body = {"token_ids": PROMPTS[2], "sampling_params": {"n": 2, "max_tokens": 2}}
    reply = httpx.post(pair.url + proxy.GENERATE, json=body, trust_env=False, timeout=60)
    assert reply.status_code == 400
    assert "send one request for each" in reply.json()["error"]["message"]


def test_client_that_leaves_a_stream_leaves_nothing_behind(
    pair: Pair, one_engine: LLM, model: Path
) -> None:
    body = {
        "token_ids": PROMPTS[3],
        "sampling_params": {**GREEDY, "max_tokens": 800},
        "stream": True,
    }
    url = pair.url + proxy.GENERATE
    with httpx.stream("POST", url, json=body, trust_env=False, timeout=60) as reply:
        next(reply.iter_lines())
    prefill(pair, random_prompt(20, 70))  # and one that never reaches the decode engine
    for server in (pair.prefill, pair.decode):
        disaggregated.wait_until_idle(server)
    (completion,) = generate(pair.url, PROMPTS[3], {**GREEDY, "max_tokens": 5})
    assert_rows_of_one_engine(one_engine, model, completion)


def test_soak_leaves_nothing_behind(pair: Pair) -> None:
    """`python -m benchmarks.soak`, for seconds."""
    load, lines = soak((pair.prefill, pair.decode), pair.url, seconds=10)
    assert not load.faults
    assert load.finished
    assert load.left
    assert lines


def test_dead_prefill_engine_ends_its_requests_alone_and_a_new_one_serves_them(
    pair: Pair, one_engine: LLM, model: Path, tmp_path: Path
) -> None:
    """Last: it ends the prefill engine. Its requests end with an error, none with wrong rows."""
    prompt = random_prompt(30, 3 * BLOCK + 7)
    orphan = prefill(pair, prompt)
    pair.prefill.stop()
    with pytest.raises(ServerError, match=r"answered 5\d\d"):
        pair.decode.post(proxy.GENERATE, orphan)
    assert pair.decode.metric("vllm:nixl_num_failed_transfers_total")
    reply = httpx.post(pair.url + proxy.GENERATE, json=orphan, trust_env=False, timeout=60)
    assert reply.status_code == 502
    # The decode engine serves on, alone and with a new prefill engine.
    assert len(pair.decode.generate(PROMPTS[1], max_tokens=3, ignore_eos=True).token_ids) == 3
    with (
        engine(model, tmp_path, "new", disaggregated.PREFILL) as new,
        proxy.running(new.url, pair.decode.url) as url,
    ):
        (completion,) = generate(url, prompt, {**GREEDY, "max_tokens": 5})
    assert_rows_of_one_engine(one_engine, model, completion)
    disaggregated.wait_until_idle(pair.decode)
