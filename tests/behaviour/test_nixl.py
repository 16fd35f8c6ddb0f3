# SPDX-License-Identifier: Apache-2.0
"""A prefill and a decode engine send KV with NIXL, from memory to memory over sockets. They run
behind `examples/proxy.py` and behind vLLM's own proxy. Answers have true rows, and a dead engine
harms nobody."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from examples import proxy
from examples.client import generate
from harness import disaggregated
from harness.disaggregated import Pair
from harness.server import Server, ServerError
from tests.behaviour import test_openai as openai_answers
from tests.behaviour.conftest import BLOCK, assert_true_completion, random_prompt

pytestmark = pytest.mark.slow

LENGTHS = (2, BLOCK, BLOCK + 1, 3 * BLOCK + 5, 150)
PROMPTS = [random_prompt(i, length) for i, length in enumerate(LENGTHS)]
GREEDY = {"temperature": 0.0, "ignore_eos": True}


@pytest.fixture(scope="module")
def pair(model: Path, line: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    folder = tmp_path_factory.mktemp("nixl")
    with disaggregated.running(model, folder, disaggregated.nixl, line) as pair:
        yield pair


@pytest.fixture(scope="module")
def plain(pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    """A client of vLLM's own proxy, which joins nothing."""
    log = tmp_path_factory.mktemp("proxy") / "proxy.log"
    with disaggregated.plain_proxy(pair, log) as url, openai_answers.connect(url) as client:
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
    with CHECKING:
        assert_true_completion(model, completion, start)


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
    (choice,) = openai_answers.read_choices(*parts).values()
    assert len(choice.prompt) == num_prompt_tokens
    assert len(choice.token_ids) == 5
    with CHECKING:
        assert_true_completion(model, choice, start)


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


def test_joined_rows_are_true_and_received_blocks_are_computed_for_others(
    pair: Pair, model: Path
) -> None:
    def complete(url: str, number: int) -> None:
        """Fill the rest of a block that was received in part, and the next one."""
        sampling = {**GREEDY, "max_tokens": BLOCK + 8}
        (completion,) = generate(url, PROMPTS[number], sampling, stream=number % 2 == 1)
        with CHECKING:
            assert_true_completion(model, completion)

    before = pair.decode.metric(disaggregated.RECEIVED) or 0
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        list(pool.map(lambda number: complete(pair.url, number), range(len(PROMPTS))))
    assert (pair.decode.metric(disaggregated.RECEIVED) or 0) - before == sum(LENGTHS)
    assert pair.decode.metric("vllm:nixl_bytes_transferred_sum")
    for number in range(len(PROMPTS)):
        complete(pair.decode.url, number)


def test_client_that_leaves_holds_no_kv(pair: Pair) -> None:
    """In the middle of its stream, and before its answer."""
    for prompt in PROMPTS:
        body = {"token_ids": prompt, "sampling_params": {**GREEDY, "max_tokens": 200}}
        url = pair.url + proxy.GENERATE
        asked = {"json": {**body, "stream": True}, "trust_env": False, "timeout": 600}
        with httpx.stream("POST", url, **asked) as reply:
            next(reply.iter_lines())
        with contextlib.suppress(httpx.ReadTimeout):
            httpx.post(url, json=body, trust_env=False, timeout=0.3)
    for server in (pair.prefill, pair.decode):
        disaggregated.wait_until_idle(server)


def test_dead_prefill_engine_ends_its_requests_alone_and_a_new_one_serves_them(
    pair: Pair, model: Path, tmp_path: Path
) -> None:
    """Last: it ends the prefill engine. Its requests end with an error, none with wrong rows."""
    prompt = random_prompt(30, 3 * BLOCK + 7)
    body = {"token_ids": prompt, "sampling_params": {**GREEDY, "max_tokens": 5}}
    first = pair.prefill.post(proxy.GENERATE, proxy.prefill_body(proxy.GENERATE, body))
    orphan = proxy.decode_body(body, first)
    pair.prefill.stop()
    with pytest.raises(ServerError, match=r"answered 5\d\d"):
        pair.decode.post(proxy.GENERATE, orphan)
    assert pair.decode.metric("vllm:nixl_num_failed_transfers_total")
    reply = httpx.post(pair.url + proxy.GENERATE, json=orphan, trust_env=False, timeout=60)
    assert reply.status_code == 502
    # The decode engine serves on, alone and with a new prefill engine.
    assert len(pair.decode.generate(PROMPTS[1], max_tokens=3, ignore_eos=True).token_ids) == 3
    arguments, variables = disaggregated.nixl(disaggregated.PREFILL)
    arguments = [*arguments, "--enforce-eager"]
    with (
        Server(model, tmp_path / "new.log", arguments, variables, line=pair.line) as new,
        proxy.running(new.url, pair.decode.url) as url,
    ):
        (completion,) = generate(url, prompt, {**GREEDY, "max_tokens": 5})
    assert_true_completion(model, completion)
    disaggregated.wait_until_idle(pair.decode)
