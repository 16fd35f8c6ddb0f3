# SPDX-License-Identifier: Apache-2.0
"""A prefill and a decode engine of this line send KV with NIXL, from memory to memory over sockets,
behind the proxy.

Prompts and engines are those of the first line's `tests/behaviour/test_nixl.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from examples import proxy
from examples.client import Completion, generate
from harness import disaggregated
from harness.server import Server
from tests.behaviour import test_openai as openai_answers
from tests.behaviour.conftest import BLOCK, assert_rows, random_prompt
from tests.behaviour.test_disaggregated_engines import Pair
from tests.behaviour.test_nixl import GREEDY, LENGTHS, PROMPTS

pytestmark = pytest.mark.slow

LINE = Path(__file__).parent.name
# The rest of a block that was received in part, and the next one.
MAX_TOKENS = 40


@pytest.fixture(scope="module")
def pair(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    folder = tmp_path_factory.mktemp("nixl")
    servers = []
    for role in (disaggregated.PREFILL, disaggregated.DECODE):
        arguments, environment = disaggregated.nixl(role)
        arguments.append("--enforce-eager")
        log = folder / f"{role}.log"
        servers.append(Server(model, log, arguments, environment, line=LINE))
    with ExitStack() as stack:
        with ThreadPoolExecutor() as pool:  # they take long to start
            started = [pool.submit(stack.enter_context, server) for server in servers]
        prefill, decode = (future.result() for future in started)
        yield Pair(prefill, decode, stack.enter_context(proxy.running(prefill.url, decode.url)))


def complete(url: str, prompt: list[int]) -> Completion:
    (completion,) = generate(url, prompt, {**GREEDY, "max_tokens": MAX_TOKENS})
    assert completion.start == 0
    return completion


def test_joined_rows_are_true_and_received_blocks_are_computed_for_others(
    pair: Pair, model: Path
) -> None:
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        joined = list(pool.map(lambda prompt: complete(pair.url, prompt), PROMPTS))
    assert pair.decode.metric(disaggregated.RECEIVED) == sum(LENGTHS)
    assert pair.decode.metric("vllm:nixl_bytes_transferred_sum")
    alone = [complete(pair.decode.url, prompt) for prompt in PROMPTS]
    for prompt, *completions in zip(PROMPTS, joined, alone, strict=True):
        for completion in completions:
            assert_rows(model, [*prompt, *completion.token_ids], completion.rows)


@pytest.fixture(scope="module")
def plain(pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    """A client of vLLM's own proxy, which joins nothing."""
    log = tmp_path_factory.mktemp("proxy") / "proxy.log"
    limits = httpx.Limits(max_keepalive_connections=0)
    with (
        disaggregated.plain_proxy(LINE, pair.prefill, pair.decode, log) as url,
        httpx.Client(trust_env=False, timeout=300, limits=limits) as http,
        openai.OpenAI(
            base_url=url + "/v1", api_key="none", max_retries=0, http_client=http
        ) as client,
    ):
        yield client


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("kind", ["completion", "chat"])
def test_plain_proxy_returns_the_rows_of_the_whole_prompt(
    plain: openai.OpenAI, pair: Pair, model: Path, kind: str, stream: bool
) -> None:
    send = openai_answers.chat if kind == "chat" else openai_answers.complete
    received = pair.decode.metric(disaggregated.RECEIVED) or 0
    for number, length in enumerate(LENGTHS):
        # The second time, the decode engine finds blocks of the prompt in its cache.
        for _ in range(2):
            if kind == "chat":
                prompt = openai_answers.words(number, length)
            else:
                prompt = random_prompt(100 + number, length)
            reply = send(
                plain, pair.decode, prompt, openai_answers.ASK_ABOVE, stream=stream, max_tokens=9
            )
            parts = list(reply) if stream else [reply]
            (choice,) = openai_answers.collect(*parts).values()
            choice.assert_true(model)
    assert (pair.decode.metric(disaggregated.RECEIVED) or 0) > received


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_rows_behind_the_plain_proxy_start_where_asked(
    plain: openai.OpenAI, pair: Pair, model: Path, stream: bool
) -> None:
    prompt = random_prompt(7, 3 * BLOCK + 5)
    for start in (0, 1, BLOCK, 2 * BLOCK + 3, len(prompt) - 1, len(prompt)):
        body = {**openai_answers.ASK_ABOVE, "routed_experts_prompt_start": start}
        reply = openai_answers.complete(
            plain, pair.decode, prompt, body, stream=stream, max_tokens=3
        )
        parts = list(reply) if stream else [reply]
        (choice,) = openai_answers.collect(*parts).values()
        choice.assert_true(model, start)


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ({}, "need routed_experts"),
        ({"n": 2}, "Ask for n=1"),
        ({"prompt": [[5], [6]]}, "one prompt"),
    ],
    ids=["no rows", "two choices", "two prompts"],
)
def test_rows_that_cannot_be_used_are_refused_with_400(
    pair: Pair, more: dict[str, Any], told: str
) -> None:
    body = {
        "model": pair.decode.checkpoint,
        "prompt": [5, 6, 7],
        "kv_transfer_params": {
            "remote_block_ids": [[1]],
            "prompt_routed_experts": {"routed_experts": 5, "secret": "SECRET"},
        },
        **more,
    }
    url = f"{pair.decode.url}/v1/completions"
    answer = httpx.post(url, json=body, trust_env=False, timeout=300)
    assert answer.status_code == 400
    message = answer.json()["error"]["message"]
    assert "kv_transfer_params.prompt_routed_experts" in message
    assert told in message
    assert "SECRET" not in message + pair.decode.log.read_text()
