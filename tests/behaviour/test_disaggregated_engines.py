# SPDX-License-Identifier: Apache-2.0
"""A prefill and a decode engine that share KV through files, behind the proxy: answers have the
tokens and rows of one engine."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from examples import proxy
from examples.client import Completion, decode_rows, generate
from harness import disaggregated
from harness.disaggregated import Pair
from tests.behaviour.conftest import (
    BLOCK,
    ask,
    compare_with_one_engine,
    random_prompt,
    run_demo,
)

if TYPE_CHECKING:
    from vllm import LLM

pytestmark = pytest.mark.slow

LENGTHS = (20, BLOCK, BLOCK + 1, 2 * BLOCK, 3 * BLOCK + 5, 150)
PROMPTS = [random_prompt(i, length) for i, length in enumerate(LENGTHS)]
MAX_TOKENS = 9


@pytest.fixture(scope="module")
def pair(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    folder = tmp_path_factory.mktemp("disaggregated")
    with disaggregated.running(model, folder, disaggregated.files(folder / "kv")) as pair:
        yield pair


def post(url: str, path: str, body: dict[str, Any]) -> httpx.Response:
    return httpx.post(url + path, json=body, trust_env=False, timeout=60)


def received(start: int, prompt: list[int]) -> dict[str, Any]:
    """A request to the decode engine without the proxy."""
    extra_args = {"return_routed_experts": True, "routed_experts_prompt_start": start}
    return {
        "token_ids": prompt,
        "sampling_params": {"max_tokens": 1, "extra_args": extra_args},
        "kv_transfer_params": {"do_remote_prefill": True},
    }


def assert_rows_of_one_engine(
    llm: LLM, model: Path, completion: Completion, start: int = 0
) -> None:
    tokens = [*completion.prompt, *completion.token_ids]
    assert completion.start == start
    assert completion.moe_layers == (0, 2, 3)
    assert len(completion.rows) == len(tokens) - 1 - start
    comparison = compare_with_one_engine(llm, model, tokens, completion.rows, start)
    assert comparison.agree == comparison.rows, comparison.disagreements[0]
    assert comparison.ties <= 2 + comparison.decisions // 1000


def test_joined_answers_have_the_tokens_and_rows_of_one_engine(
    pair: Pair, one_engine: LLM, model: Path
) -> None:
    def complete(number: int) -> Completion:
        sampling = {"temperature": 0.0, "ignore_eos": True, "max_tokens": MAX_TOKENS}
        (completion,) = generate(pair.url, PROMPTS[number], sampling, stream=number % 2 == 1)
        return completion

    before = pair.decode.metric(disaggregated.RECEIVED) or 0
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        completions = list(pool.map(complete, range(len(PROMPTS))))
    blocks = [(length - 1) // BLOCK for length in LENGTHS]
    assert (pair.decode.metric(disaggregated.RECEIVED) or 0) - before == BLOCK * sum(blocks)
    outputs = ask(one_engine, *PROMPTS, max_tokens=MAX_TOKENS)
    for completion, output in zip(completions, outputs, strict=True):
        assert completion.token_ids == tuple(output.outputs[0].token_ids)
        assert_rows_of_one_engine(one_engine, model, completion)


@pytest.mark.parametrize("stream", [False, True])
def test_every_choice_of_a_group_has_all_rows(
    pair: Pair, one_engine: LLM, model: Path, stream: bool
) -> None:
    prompt = random_prompt(10 + stream, 3 * BLOCK + 7)
    sampling = {"n": 3, "temperature": 1.0, "seed": 1, "ignore_eos": True, "max_tokens": 7}
    completions = generate(pair.url, prompt, sampling, stream=stream)
    assert len({completion.token_ids for completion in completions}) == 3
    for completion in completions:
        assert_rows_of_one_engine(one_engine, model, completion)


def test_asked_start_behind_the_received_prefix_is_kept(
    pair: Pair, one_engine: LLM, model: Path
) -> None:
    prompt = random_prompt(20, 3 * BLOCK + 7)
    for start in (BLOCK + 3, 3 * BLOCK + 2):
        (completion,) = generate(
            pair.url, prompt, {"max_tokens": 5, "ignore_eos": True}, start=start
        )
        assert_rows_of_one_engine(one_engine, model, completion, start)


@pytest.mark.parametrize("start", [0, BLOCK, 3 * BLOCK + 2])
def test_decode_engine_states_where_its_rows_begin(pair: Pair, start: int) -> None:
    prompt = random_prompt(30 + start, 3 * BLOCK + 7)
    generate(pair.prefill.url, prompt, {"max_tokens": 1})
    answer = pair.decode.post(proxy.GENERATE, received(start, prompt))["choices"][0]
    assert answer["routed_experts_start"] == max(start, 3 * BLOCK)
    assert len(decode_rows(answer["routed_experts"])) == len(prompt) - max(start, 3 * BLOCK)


@pytest.mark.parametrize(
    ("num_prompts", "start"), [(1, 0), (2, 2 * BLOCK)], ids=["one prompt", "two prompts"]
)
def test_openai_completions_have_all_rows_of_one_prompt(
    pair: Pair, one_engine: LLM, model: Path, num_prompts: int, start: int
) -> None:
    """With several prompts, the rows begin after the received KV."""
    prompts = [random_prompt(40 + num_prompts + i, 2 * BLOCK + 9) for i in range(num_prompts)]
    body = {
        "model": pair.prefill.checkpoint,
        "prompt": prompts,
        "n": 2,
        "seed": 1,
        "max_tokens": 5,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    answer = post(pair.url, "/v1/completions", body).json()
    assert len(answer["choices"]) == 2 * num_prompts
    for choice in answer["choices"]:
        assert choice["prompt_token_ids"] == prompts[choice["index"] // 2]
        completion = Completion(
            prompt=tuple(choice["prompt_token_ids"]),
            token_ids=tuple(choice["token_ids"]),
            logprobs=(),
            rows=decode_rows(choice["routed_experts"]),
            start=choice["routed_experts_start"],
            moe_layers=tuple(choice["moe_layers"]),
        )
        assert_rows_of_one_engine(one_engine, model, completion, start)


def test_silent_request_is_answered_without_rows(pair: Pair) -> None:
    sampling = {"max_tokens": 5, "extra_args": {"return_routed_experts": False}}
    body = {"token_ids": random_prompt(50, 3 * BLOCK), "sampling_params": sampling}
    reply = post(pair.url, proxy.GENERATE, body)
    assert reply.status_code == 200
    assert "routed_experts" not in reply.json()["choices"][0]


def test_bad_argument_is_refused_by_the_engine(pair: Pair) -> None:
    extra_args = {"routed_experts_prompt_start": 6}
    body = {"token_ids": [5, 6, 7], "sampling_params": {"extra_args": extra_args}}
    reply = post(pair.url, proxy.GENERATE, body)
    assert reply.status_code == 400
    assert "routed_experts_prompt_start" in reply.json()["error"]["message"]


def test_program_finds_every_row_true(tmp_path: Path) -> None:
    done = run_demo("disaggregated", tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "PASSED" in done.stdout
