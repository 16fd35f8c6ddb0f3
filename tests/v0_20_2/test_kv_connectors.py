# SPDX-License-Identifier: Apache-2.0
"""Received KV has no rows: its tokens are computed again, or the rows begin after it. End to end
with two connectors of vLLM: OffloadingConnector, and ExampleConnector (files), made to lose
blocks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from tests.behaviour.conftest import (
    BLOCK,
    ask,
    assert_all_true,
    assert_true_rows,
    caches,
    random_prompt,
    running,
    scheduler_of,
)

if TYPE_CHECKING:
    from vllm import LLM
    from vllm.outputs import RequestOutput

LENGTH = 3 * BLOCK + 5
ASKS = {"return_routed_experts": True}
RECEIVES = {**ASKS, "kv_transfer_params": {"do_remote_prefill": True}}
SILENT: dict[str, Any] = {}

CONNECTORS: dict[str, dict[str, Any]] = {
    "example": {
        "kv_connector": "LosingConnector",
        "kv_connector_module_path": "tests.v0_20_2.losing_connector",
        "kv_load_failure_policy": "recompute",
    },
    "offloading": {
        "kv_connector": "OffloadingConnector",
        "kv_connector_extra_config": {
            "spec_name": "HostOffloadingSpec",
            "spec_module_path": "tests.v0_20_2.host_offload",
            "cpu_bytes_to_use": 32 << 20,
        },
    },
}


# All connectors with the prefix cache, and one without.
CACHING = [pytest.param((name, True), id=name) for name in CONNECTORS]
WITHOUT = pytest.param(("example", False), id="example without prefix cache")


@pytest.fixture(scope="module", params=[*CACHING, WITHOUT])
def llm(
    model: Path, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LLM]:
    from vllm.config import KVTransferConfig

    name, caching = request.param
    settings = {"kv_role": "kv_both", **CONNECTORS[name]}
    if name == "example":
        folder = str(tmp_path_factory.mktemp("kv"))
        settings["kv_connector_extra_config"] = {"shared_storage_path": folder}
    with running(
        model,
        enable_prefix_caching=caching,
        # Connectors save prompts that one step computes.
        max_num_batched_tokens=1024,
        routed_experts_opt_in=True,
        kv_transfer_config=KVTransferConfig(**settings),
    ) as llm:
        yield llm


def generate(llm: LLM, *prompts: list[int], ways: list[dict[str, Any]]) -> list[RequestOutput]:
    """Complete prompts at once, each in its way: values of `extra_args`."""
    return ask(llm, *prompts, each=[{"extra_args": way} for way in ways])


def save(llm: LLM, *prompts: list[int]) -> list[RequestOutput]:
    """Answers of a prefill engine; its prefix cache forgets the prompts."""
    outputs = generate(llm, *prompts, ways=[ASKS] * len(prompts))
    # Offloading happens in the next step.
    generate(llm, random_prompt(99, 3), ways=[SILENT])
    assert llm.reset_prefix_cache()
    return outputs


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


@pytest.mark.parametrize("llm", CACHING, indirect=True)
def test_received_tokens_may_lie_behind_cached_ones(llm: LLM, model: Path) -> None:
    """The cached tokens have rows, but a gap would separate them from the others."""
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
    assert [output.num_cached_tokens for output in outputs[1::3]] == [0, 0]
    assert_all_true(model, outputs[1::3])
    for output in outputs[2::3]:
        assert output.num_cached_tokens >= 3 * BLOCK
        assert output.outputs[0].routed_experts is None


def test_received_prefix_serves_a_longer_prompt_later(llm: LLM, model: Path) -> None:
    """Its KV is in the prefix cache without rows: its tokens are computed again, once."""
    prompt = random_prompt(40, LENGTH)
    save(llm, prompt)
    generate(llm, prompt, ways=[RECEIVES])
    longer = [*prompt, *random_prompt(41, BLOCK)]
    for cached in (0, 4 * BLOCK * caches(llm)):
        outputs = generate(llm, longer, ways=[ASKS])
        assert outputs[0].num_cached_tokens == cached
        assert_all_true(model, outputs)
    assert not scheduler_of(llm).routed_experts.requests


@pytest.mark.parametrize("llm", [CACHING[0], WITHOUT], indirect=True)
@pytest.mark.parametrize("lost", [0, 1, 2])
def test_tokens_that_failed_to_load_are_computed(llm: LLM, model: Path, lost: int) -> None:
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    prompt = random_prompt(60 + lost, LENGTH)
    save(llm, prompt)
    get_kv_transfer_group().lose = lost
    (output,) = generate(llm, prompt, ways=[RECEIVES])
    assert_true_rows(model, prompt, output.outputs[0], start=lost * BLOCK)
    # Nothing of the failed step is in the store.
    assert_all_true(model, generate(llm, prompt, ways=[ASKS]))
