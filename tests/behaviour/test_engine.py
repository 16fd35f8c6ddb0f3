# SPDX-License-Identifier: Apache-2.0
"""One engine, prefix caching and chunked prefill on: the form of rows, and what they leave alone.
Features beside them: test_features.py."""

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
