# SPDX-License-Identifier: Apache-2.0
"""KV connectors that vLLM ships, end to end: ExampleConnector (files) and OffloadingConnector."""

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

MAX_TOKENS = 6
LENGTH = 3 * BLOCK + 5
REMOTE_PREFILL = {"kv_transfer_params": {"do_remote_prefill": True}}


def example_connector(folder: Path) -> dict[str, Any]:
    return {
        "kv_connector": "ExampleConnector",
        "kv_connector_extra_config": {"shared_storage_path": str(folder)},
    }


def offloading_connector(folder: Path) -> dict[str, Any]:
    return {
        "kv_connector": "OffloadingConnector",
        "kv_connector_extra_config": {
            "spec_name": "HostOffloadingSpec",
            "spec_module_path": "tests.behaviour.host_offload",
            "cpu_bytes_to_use": 32 << 20,
        },
    }


@pytest.fixture(scope="module")
def model(checkpoint: Callable[..., Path]) -> Path:
    return checkpoint()


@pytest.fixture(scope="module", params=[example_connector, offloading_connector])
def llm(
    model: Path, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LLM]:
    from vllm.config import KVTransferConfig

    settings = request.param(tmp_path_factory.mktemp("kv"))
    with running(
        model,
        # ExampleConnector saves what the first step of a prompt computes.
        max_num_batched_tokens=1024,
        routed_experts_opt_in=True,
        kv_transfer_config=KVTransferConfig(kv_role="kv_both", **settings),
    ) as llm:
        yield llm


def generate(llm: LLM, *prompts: list[int], ways: list[dict[str, Any]]) -> list[RequestOutput]:
    """Complete prompts at once, each in its way: values of `extra_args`."""
    from vllm import SamplingParams

    params = [
        SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=MAX_TOKENS, extra_args=way)
        for way in ways
    ]
    return llm.generate(as_prompts(*prompts), params, use_tqdm=False)


ASKS = {"return_routed_experts": True}
RECEIVES = {**ASKS, **REMOTE_PREFILL}
SILENT: dict[str, Any] = {}


def save(llm: LLM, *prompts: list[int]) -> list[RequestOutput]:
    """Answers of a prefill engine; its prefix cache forgets the prompts."""
    outputs = generate(llm, *prompts, ways=[ASKS] * len(prompts))
    # What is offloaded leaves with the next step.
    generate(llm, random_prompt(99, 3), ways=[SILENT])
    assert llm.reset_prefix_cache()
    return outputs


def test_request_computes_what_the_connector_has(llm: LLM, model: Path) -> None:
    prompt = random_prompt(1, LENGTH)
    save(llm, prompt)
    outputs = generate(llm, prompt, ways=[ASKS])
    assert outputs[0].num_cached_tokens == 0
    assert_all_true(model, outputs)


def test_silent_request_loads_it(llm: LLM) -> None:
    prompt = random_prompt(2, LENGTH)
    (before,) = save(llm, prompt)
    (output,) = generate(llm, prompt, ways=[SILENT])
    assert output.num_cached_tokens == 3 * BLOCK
    assert output.outputs[0].token_ids == before.outputs[0].token_ids
    assert output.outputs[0].routed_experts is None


@pytest.mark.parametrize("length", [20, BLOCK, BLOCK + 1, 2 * BLOCK, LENGTH])
def test_rows_begin_behind_what_was_received_and_join(llm: LLM, model: Path, length: int) -> None:
    prompt = random_prompt(10 + length, length)
    (prefilled,) = save(llm, prompt)
    (output,) = generate(llm, prompt, ways=[RECEIVES])
    completion = output.outputs[0]
    start = completion.routed_experts_start
    # The last token is computed, even if its KV was received (offloaded are all full blocks).
    assert output.num_cached_tokens in ((length - 1) // BLOCK * BLOCK, length // BLOCK * BLOCK)
    assert start == min(output.num_cached_tokens, length - 1)
    assert completion.token_ids == prefilled.outputs[0].token_ids
    assert_true_rows(model, prompt, completion, start)
    before = prefilled.outputs[0].routed_experts[:start]
    completion.routed_experts = np.concatenate([before, completion.routed_experts])
    completion.routed_experts_start = 0
    assert_true_rows(model, prompt, completion)


def test_received_tokens_may_lie_behind_cached_ones(llm: LLM, model: Path) -> None:
    """These have rows, which a gap would part from the others."""
    prompt = random_prompt(50, 4 * BLOCK + 5)
    save(llm, prompt)
    generate(llm, prompt[: 2 * BLOCK + 1], ways=[ASKS])
    (output,) = generate(llm, prompt, ways=[RECEIVES])
    assert output.num_cached_tokens == 4 * BLOCK
    assert_true_rows(model, prompt, output.outputs[0], 4 * BLOCK)


def test_one_step_receives_computes_and_is_silent(llm: LLM, model: Path) -> None:
    prompts = [random_prompt(seed, LENGTH + seed) for seed in range(30, 36)]
    saved = save(llm, *prompts)
    outputs = generate(llm, *prompts, ways=[RECEIVES, ASKS, SILENT] * 2)
    for before, output in zip(saved, outputs, strict=True):
        assert output.outputs[0].token_ids == before.outputs[0].token_ids
    for prompt, output in zip(prompts[::3], outputs[::3], strict=True):
        start = output.num_cached_tokens
        assert start >= 3 * BLOCK
        assert_true_rows(model, prompt, output.outputs[0], start)
    assert_all_true(model, outputs[1::3])
    assert all(o.outputs[0].routed_experts is None for o in outputs[2::3])


def test_received_prefix_serves_a_longer_prompt_later(llm: LLM, model: Path) -> None:
    """Its KV is in the prefix cache, its rows are not: they are computed, once."""
    prompt = random_prompt(40, LENGTH)
    save(llm, prompt)
    generate(llm, prompt, ways=[RECEIVES])
    longer = [*prompt, *random_prompt(41, BLOCK)]
    for cached in (0, 4 * BLOCK):
        outputs = generate(llm, longer, ways=[ASKS])
        assert outputs[0].num_cached_tokens == cached
        assert_all_true(model, outputs)
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    assert len(scheduler.routed_experts_manager) == 0
