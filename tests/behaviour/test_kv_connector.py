# SPDX-License-Identifier: Apache-2.0
"""KV from elsewhere has no rows: they are computed, or the answer begins behind it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from tests.behaviour.conftest import (
    BLOCK,
    as_prompts,
    assert_all_true,
    assert_true_rows,
    random_prompt,
    running,
)

if TYPE_CHECKING:
    from vllm import LLM
    from vllm.outputs import RequestOutput

REMOTE_PREFILL = {"kv_transfer_params": {"do_remote_prefill": True}}


@pytest.fixture(scope="module")
def model(checkpoint: Callable[..., Path]) -> Path:
    return checkpoint()


@pytest.fixture(scope="module", params=[True, False], ids=["caching", "no_caching"])
def llm(model: Path, request: pytest.FixtureRequest) -> Iterator[LLM]:
    from vllm.config import KVTransferConfig

    with running(
        model,
        enable_prefix_caching=request.param,
        max_num_batched_tokens=256,
        routed_experts_opt_in=True,
        kv_transfer_config=KVTransferConfig(
            kv_connector="MemoryConnector",
            kv_connector_module_path="tests.behaviour.memory_connector",
            kv_role="kv_both",
            kv_load_failure_policy="recompute",
        ),
    ) as llm:
        yield llm


def generate(llm: LLM, prompt: list[int], asks: bool = True, **options: Any) -> RequestOutput:
    from vllm import SamplingParams

    extra_args = {"return_routed_experts": asks, **options.pop("extra_args", {})}
    params = SamplingParams(
        **{"temperature": 0.0, "ignore_eos": True, "max_tokens": 6, **options},
        extra_args=extra_args,
    )
    (output,) = llm.generate(as_prompts(prompt), params, use_tqdm=False)
    return output


def connector_of(llm: LLM) -> Any:
    return llm.llm_engine.engine_core.engine_core.scheduler.connector


def save(llm: LLM, prompt: list[int]) -> RequestOutput:
    """What the prefill engine answers; its prefix cache forgets the prompt."""
    output = generate(llm, prompt, max_tokens=1)
    assert connector_of(llm).saved
    assert llm.reset_prefix_cache()
    return output


def test_request_computes_tokens_that_the_connector_has(llm: LLM, model: Path) -> None:
    prompt = random_prompt(1, 3 * BLOCK + 5)
    save(llm, prompt)
    output = generate(llm, prompt)
    assert_all_true(model, [output])


def test_silent_request_loads_them(llm: LLM) -> None:
    prompt = random_prompt(2, 3 * BLOCK + 5)
    save(llm, prompt)
    assert generate(llm, prompt, asks=False).num_cached_tokens == 3 * BLOCK


def test_rows_of_prefill_and_decode_engine_join(llm: LLM, model: Path) -> None:
    prompt = random_prompt(3, 3 * BLOCK + 5)
    prefilled = save(llm, prompt).outputs[0]
    assert len(prefilled.routed_experts) == len(prompt)
    completion = generate(llm, prompt, extra_args=REMOTE_PREFILL).outputs[0]
    assert_true_rows(model, prompt, completion, start=3 * BLOCK)
    completion.routed_experts = np.concatenate(
        [prefilled.routed_experts[: 3 * BLOCK], completion.routed_experts]
    )
    completion.routed_experts_start = 0
    assert_true_rows(model, prompt, completion)


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_tokens_that_failed_to_load_are_computed(llm: LLM, model: Path, lost: int) -> None:
    prompt = random_prompt(4 + lost, 3 * BLOCK + 5)
    save(llm, prompt)
    connector_of(llm).lose = lost
    completion = generate(llm, prompt, extra_args=REMOTE_PREFILL).outputs[0]
    assert_true_rows(model, prompt, completion, start=lost * BLOCK)
    # Nothing of the failed step is in the store.
    assert_all_true(model, [generate(llm, prompt)])
