# SPDX-License-Identifier: Apache-2.0
"""A prefill and a decode engine send KV with NIXL, from memory to memory over sockets, behind the
proxy: answers have the tokens and rows of one engine; an abort and a dead engine harm nobody."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import openai
import pytest

from benchmarks.soak import soak
from examples import proxy
from examples.client import Completion, generate
from harness import disaggregated
from harness.disaggregated import Pair
from harness.server import Server, ServerError
from tests.behaviour import test_openai as openai_answers
from tests.behaviour.conftest import BLOCK, ask, assert_rows, random_prompt
from tests.behaviour.test_disaggregated_engines import assert_rows_of_one_engine

if TYPE_CHECKING:
    from vllm import LLM

pytestmark = pytest.mark.slow

LENGTHS = (2, BLOCK, BLOCK + 1, 3 * BLOCK + 5, 150)
PROMPTS = [random_prompt(i, length) for i, length in enumerate(LENGTHS)]
GREEDY = {"temperature": 0.0, "ignore_eos": True}


@pytest.fixture(scope="module")
def pair(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    folder = tmp_path_factory.mktemp("nixl")
    with disaggregated.running(model, folder, disaggregated.nixl) as pair:
        yield pair


@pytest.fixture(scope="module")
def plain(pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    """A client of vLLM's own proxy, which joins nothing."""
    log = tmp_path_factory.mktemp("proxy") / "proxy.log"
    limits = httpx.Limits(max_keepalive_connections=0)
    with (
        disaggregated.plain_proxy(pair, log) as url,
        httpx.Client(trust_env=False, timeout=300, limits=limits) as http,
        openai.OpenAI(
            base_url=url + "/v1", api_key="none", max_retries=0, http_client=http
        ) as client,
    ):
        yield client


@dataclass(frozen=True)
class Case:
    """A prompt and the position of the first row wanted: so many tokens after the prompt's first
    one, or before its end."""

    seed: int
    length: int
    after: int = 0
    before_end: int | None = None

    def start(self, num_prompt_tokens: int) -> int:
        return self.after if self.before_end is None else num_prompt_tokens - self.before_end


# The decode engine receives whole prompts: starts lie before, in and after what it receives.
CASES = [Case(100 + i, length) for i, length in enumerate(LENGTHS)]
CASES += [Case(110 + i, 3 * BLOCK + 5, start) for i, start in enumerate((1, BLOCK, 2 * BLOCK + 3))]
CASES += [Case(120 + i, 3 * BLOCK + 5, before_end=i) for i in (0, 1)]

# Several threads ask. Only one at a time can use the oracle.
CHECKING = threading.Lock()


def ask_generate(pair: Pair, model: Path, case: Case, seed: int, stream: bool) -> None:
    """Ask `examples/proxy.py`, and compare every row."""
    prompt = random_prompt(case.seed + seed, case.length)
    start = case.start(len(prompt))
    sampling = {**GREEDY, "max_tokens": 5}
    (completion,) = generate(pair.url, prompt, sampling, start=start, stream=stream)
    assert completion.start == start
    with CHECKING:
        assert_rows(model, [*prompt, *completion.token_ids], completion.rows, start)


def ask_plain(
    plain: openai.OpenAI, pair: Pair, model: Path, case: Case, seed: int, kind: str, stream: bool
) -> None:
    """Ask vLLM's own proxy, and compare every row."""
    seed += case.seed
    if kind == "chat":
        prompt: Any = openai_answers.words(seed, case.length)
        messages = {"messages": [{"role": "user", "content": prompt}]}
        num_prompt_tokens = pair.decode.post("/tokenize", messages)["count"]
        send: Any = openai_answers.chat
    else:
        prompt = random_prompt(seed, case.length)
        num_prompt_tokens = case.length
        send = openai_answers.complete
    start = case.start(num_prompt_tokens)
    body = {**openai_answers.ASK_ABOVE, "routed_experts_prompt_start": start}
    reply = send(plain, pair.decode, prompt, body, stream=stream, max_tokens=5)
    parts = list(reply) if stream else [reply]
    (choice,) = openai_answers.collect(*parts).values()
    assert len(choice.prompt) == num_prompt_tokens
    assert len(choice.token_ids) == 5
    with CHECKING:
        choice.assert_true(model, start)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("kind", ["generate", "completion", "chat"])
def test_answer_has_every_row_from_the_asked_one_on(
    plain: openai.OpenAI, pair: Pair, model: Path, kind: str, stream: bool
) -> None:
    """/inference/v1/generate by `examples/proxy.py`, the others by vLLM's own proxy."""
    seed = 1000 * ["generate", "completion", "chat"].index(kind) + 500 * stream

    def ask(case: Case) -> None:
        if kind == "generate":
            ask_generate(pair, model, case, seed, stream)
        else:
            ask_plain(plain, pair, model, case, seed, kind, stream)

    def ask_all() -> tuple[float, float]:
        """How many tokens the decode engine received, and found in its own cache."""
        names = (disaggregated.RECEIVED, disaggregated.CACHED)
        before = [pair.decode.metric(name) or 0 for name in names]
        with ThreadPoolExecutor(len(CASES)) as pool:
            list(pool.map(ask, CASES))
        received, cached = (
            (pair.decode.metric(name) or 0) - value
            for name, value in zip(names, before, strict=True)
        )
        return received, cached

    received, _ = ask_all()
    received_again, cached_again = ask_all()
    assert received > received_again > 0
    assert cached_again > 0


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("kind", ["completion", "chat"])
def test_rows_that_the_decode_engine_computed_before_join_those_of_the_prefill_engine(
    plain: openai.OpenAI, pair: Pair, model: Path, kind: str, stream: bool
) -> None:
    """It has computed the prompt's first blocks for somebody else, and receives the others."""
    case = Case(130, 3 * BLOCK + 5)
    seed = 10 * stream + 20 * (kind == "chat")
    send: Any = openai_answers.chat if kind == "chat" else openai_answers.complete
    prompt: Any = random_prompt(case.seed + seed, case.length)[: 2 * BLOCK + 1]
    if kind == "chat":
        prompt = openai_answers.words(case.seed + seed, case.length)
    with httpx.Client(trust_env=False, timeout=300) as http:
        url = pair.decode.url + "/v1"
        alone = openai.OpenAI(base_url=url, api_key="none", max_retries=0, http_client=http)
        send(alone, pair.decode, prompt, openai_answers.ASK_ABOVE, max_tokens=2)
    cached = pair.decode.metric(disaggregated.CACHED) or 0
    ask_plain(plain, pair, model, case, seed, kind, stream)
    assert (pair.decode.metric(disaggregated.CACHED) or 0) - cached >= 2 * BLOCK


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ({}, "routed_experts_start"),
        ({"n": 2}, "n=1"),
        ({"prompt": [[5], [6]]}, "one prompt"),
    ],
    ids=["no start", "two choices", "two prompts"],
)
def test_rows_that_cannot_be_used_are_refused_with_400(
    pair: Pair, more: dict[str, Any], told: str
) -> None:
    rows = {"routed_experts": "AAAA", "secret": "SECRET"}
    body = {
        "model": pair.decode.checkpoint,
        "prompt": [5, 6, 7],
        "kv_transfer_params": {"remote_block_ids": [[1]], "prompt_routed_experts": rows},
        **more,
    }
    url = f"{pair.decode.url}/v1/completions"
    answer = httpx.post(url, json=body, trust_env=False, timeout=300)
    assert answer.status_code == 400
    message = answer.json()["error"]["message"]
    assert "kv_transfer_params.prompt_routed_experts" in message
    assert told in message
    assert "SECRET" not in message + pair.decode.log.read_text()


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

    before = pair.decode.metric(disaggregated.RECEIVED) or 0
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        completions = list(pool.map(complete, range(len(PROMPTS))))
    assert (pair.decode.metric(disaggregated.RECEIVED) or 0) - before == sum(LENGTHS)
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
    load, lines = soak(pair, seconds=10)
    assert not load.faults
    assert load.finished
    assert load.left
    assert load.refused
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
        Server(model, tmp_path / "new.log", *disaggregated.nixl(disaggregated.PREFILL)) as new,
        proxy.running(new.url, pair.decode.url) as url,
    ):
        (completion,) = generate(url, prompt, {**GREEDY, "max_tokens": 5})
    assert_rows_of_one_engine(one_engine, model, completion)
    disaggregated.wait_until_idle(pair.decode)
