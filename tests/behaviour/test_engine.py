# SPDX-License-Identifier: Apache-2.0
"""One engine, prefix caching and chunked prefill on: every request gets exactly its rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from tests.behaviour.conftest import (
    BLOCK,
    CHUNK,
    as_prompts,
    assert_all_true,
    random_prompt,
    running,
)

if TYPE_CHECKING:
    from vllm import LLM, RequestOutput


@pytest.fixture(scope="module")
def model(checkpoint: Callable[..., Path]) -> Path:
    return checkpoint(mlp_only_layers=[1])


@pytest.fixture(scope="module")
def llm(model: Path) -> Iterator[LLM]:
    with running(model) as llm:
        yield llm


def generate(llm: LLM, *prompts: list[int], **sampling: object) -> list[RequestOutput]:
    from vllm import SamplingParams

    params = SamplingParams(**{"temperature": 0.0, "ignore_eos": True, "max_tokens": 6, **sampling})
    return llm.generate(as_prompts(*prompts), params, use_tqdm=False)


@pytest.mark.parametrize("length", [1, BLOCK, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 5])
def test_prompt_of_any_length_has_true_rows(llm: LLM, model: Path, length: int) -> None:
    assert_all_true(model, generate(llm, random_prompt(length, length)))


def test_requests_of_one_batch_have_their_own_rows(llm: LLM, model: Path) -> None:
    prompts = [random_prompt(100 + i, n) for i, n in enumerate((5, 90, 33, 150, 2, 64, 70, 10, 21))]
    assert_all_true(model, generate(llm, *prompts))


def test_request_that_repeats_a_prompt_has_true_rows(llm: LLM, model: Path) -> None:
    prompt = random_prompt(200, 4 * BLOCK)
    first, second = (generate(llm, prompt)[0] for _ in range(2))
    assert_all_true(model, [first, second])


def test_request_that_continues_a_conversation_has_true_rows(llm: LLM, model: Path) -> None:
    prompt = random_prompt(201, 2 * BLOCK + 3)
    answer = generate(llm, prompt, max_tokens=BLOCK)[0]
    conversation = [*prompt, *answer.outputs[0].token_ids, *random_prompt(202, 9)]
    assert_all_true(model, generate(llm, conversation))


def test_parallel_samples_have_their_own_rows(llm: LLM, model: Path) -> None:
    outputs = generate(llm, random_prompt(300, 80), n=4, temperature=1.0, seed=1, max_tokens=9)
    assert len({tuple(c.token_ids) for c in outputs[0].outputs}) > 1
    assert_all_true(model, outputs)


def test_single_token_has_the_rows_of_the_prompt(llm: LLM, model: Path) -> None:
    (output,) = generate(llm, random_prompt(301, 40), max_tokens=1)
    assert_all_true(model, [output])
    assert len(output.outputs[0].routed_experts) == 40


def test_rows_end_with_the_stop_token(llm: LLM, model: Path) -> None:
    prompt = random_prompt(302, 20)
    unstopped = generate(llm, prompt, max_tokens=8)[0].outputs[0].token_ids
    (output,) = generate(llm, prompt, max_tokens=8, stop_token_ids=[unstopped[3]])
    assert output.outputs[0].finish_reason == "stop"
    assert len(output.outputs[0].token_ids) <= 4
    assert_all_true(model, [output])


def test_rows_end_with_the_stop_string(llm: LLM, model: Path) -> None:
    prompt = random_prompt(303, 20)
    text = generate(llm, prompt, max_tokens=8)[0].outputs[0].text
    (output,) = generate(llm, prompt, max_tokens=8, stop=[text[2:4]])
    assert output.outputs[0].finish_reason == "stop"
    assert len(output.outputs[0].token_ids) < 8
    assert_all_true(model, [output])


def test_prompt_logprobs_do_not_disturb_rows(llm: LLM, model: Path) -> None:
    outputs = generate(llm, random_prompt(304, CHUNK + 30), prompt_logprobs=1, logprobs=1)
    assert_all_true(model, outputs)


def test_dense_layers_are_zero_and_not_named(llm: LLM) -> None:
    completion = generate(llm, random_prompt(305, 30))[0].outputs[0]
    assert completion.moe_layers == (0, 2, 3)
    assert not completion.routed_experts[:, 1].any()


def test_rows_are_one_byte_an_id(llm: LLM) -> None:
    rows = generate(llm, random_prompt(306, 30))[0].outputs[0].routed_experts
    assert rows.dtype == np.uint8
    assert rows.shape == (35, 4, 4)


def test_split_tells_prompt_from_generation(llm: LLM) -> None:
    completion = generate(llm, random_prompt(307, 30))[0].outputs[0]
    prompt_rows, generation_rows = completion.split_routed_experts()
    assert (len(prompt_rows), len(generation_rows)) == (30, 5)


def test_seeded_request_samples_the_same_in_chunks(llm: LLM, model: Path) -> None:
    """A chunk's discarded sample must not advance the request's random numbers."""
    prompt = random_prompt(308, 3 * CHUNK)
    options = {"temperature": 1.0, "seed": 7, "max_tokens": 12}
    (in_chunks,) = generate(llm, prompt, **options)
    with running(model, max_num_batched_tokens=512) as whole:
        (at_once,) = generate(whole, prompt, **options)
    assert in_chunks.outputs[0].token_ids == at_once.outputs[0].token_ids
    assert_all_true(model, [in_chunks])


def test_preempted_requests_have_true_rows(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    preempted = []
    # Room for 30 blocks: eight requests of up to 8 blocks each must take turns.
    with running(model, num_gpu_blocks_override=30) as small:
        scheduler = small.llm_engine.engine_core.engine_core.scheduler
        preempt = scheduler._preempt_request
        monkeypatch.setattr(
            scheduler,
            "_preempt_request",
            lambda request, at: (preempted.append(request.request_id), preempt(request, at)),
        )
        prompts = [random_prompt(400 + i, 3 * BLOCK) for i in range(8)]
        outputs = generate(small, *prompts, max_tokens=5 * BLOCK)
        assert len(scheduler.routed_experts_manager) == 0
    assert preempted
    assert_all_true(model, outputs)


def test_tokens_are_those_of_an_engine_without_rows(llm: LLM, model: Path) -> None:
    prompts = [random_prompt(500 + i, n) for i, n in enumerate((5, 90, 200))]
    with running(model, enable_return_routed_experts=False) as silent:
        expected = generate(silent, *prompts, logprobs=2)
    for got, want in zip(generate(llm, *prompts, logprobs=2), expected, strict=True):
        assert got.outputs[0].token_ids == want.outputs[0].token_ids
        assert got.outputs[0].logprobs == want.outputs[0].logprobs
        assert want.outputs[0].routed_experts is None
