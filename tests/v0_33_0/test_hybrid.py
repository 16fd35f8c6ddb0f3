# SPDX-License-Identifier: Apache-2.0
"""Hybrid models whose block hashes are finer than their KV blocks: rows are the choices of their
routers. A silent request may hit a prefix that ends within a KV block, an asking one may not.

| model | oracle | why this one |
|---|---|---|
| LFM2-MoE (convolution and full attention) | Hugging Face's routers | runs in float32 |
| Qwen3-Next (linear and full attention) | router logits of the same forward | its CPU kernels take
  bfloat16 only |
| Granite 4 (Mamba-2 and full attention) | Hugging Face's routers | runs in float32, but with prefix
  caching not on a CPU, with the flag off either |
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from harness import recorder
from tests.behaviour.conftest import (
    BLOCK,
    CHUNK,
    ask,
    assert_all_true,
    random_prompt,
    running,
    scheduler_of,
)
from tests.behaviour.test_families import (  # noqa: F401
    Case,
    Served,
    assert_own_rows,
    test_rows_are_what_the_logits_of_the_same_forward_choose,
)

if TYPE_CHECKING:
    from vllm import LLM
    from vllm.outputs import RequestOutput

pytestmark = pytest.mark.slow

HASH = 8
HYBRID = {"prefix_match_unit": HASH}


@pytest.fixture(scope="module")
def lfm2(checkpoint: Callable[..., Path]) -> Iterator[Served]:
    case = Case("lfm2_moe", moe_layers=(1, 2, 3))
    model = checkpoint(case.family)
    with running(model, **HYBRID) as llm:
        assert_hashes_are_finer(llm)
        yield Served(case, model, llm)


@pytest.fixture(scope="module")
def recorded(checkpoint: Callable[..., Path]) -> Iterator[Served]:
    case = Case("qwen3_next")
    model = checkpoint(case.family)
    options = {"dtype": "bfloat16", "worker_extension_cls": "harness.recorder.Recorder"}
    with running(model, **HYBRID, **options) as llm:
        assert_hashes_are_finer(llm)
        llm.collective_rpc("record_start")
        yield Served(case, model, llm)


def ask_twice(served: Served, prefix: list[int]) -> tuple[RequestOutput, RequestOutput]:
    """Answers to two prompts that begin with a cached one, one silent and one that asks."""
    prompts = [[*prefix, *random_prompt(seed, 20)] for seed in (90, 91)]
    each = [{"return_routed_experts": asks} for asks in (False, True)]
    silent, asking = ask(served.llm, *prompts, each=each, max_tokens=8)
    assert silent.outputs[0].routed_experts is None
    return silent, asking


def block_of(llm: LLM) -> int:
    """Tokens in a KV block: 32, or more if a kernel of this CPU needs it."""
    groups = scheduler_of(llm).kv_cache_config.kv_cache_groups
    assert len(groups) > 1
    return int(min(group.kv_cache_spec.block_size for group in groups))


def assert_hashes_are_finer(llm: LLM) -> None:
    assert scheduler_of(llm).hash_block_size == HASH < block_of(llm)


def test_rows_of_lfm2_are_those_of_transformers(lfm2: Served) -> None:
    block = block_of(lfm2.llm)
    prompts = [random_prompt(i, n) for i, n in enumerate((5, 2 * CHUNK + 9, block + 12, 1))]
    outputs = lfm2.ask(*prompts)
    silent, asking = ask_twice(lfm2, prompts[2])
    assert silent.num_cached_tokens == block + HASH
    assert asking.num_cached_tokens == block
    assert_all_true(lfm2.model, [*outputs, asking])


def test_rows_of_qwen3_next_after_a_cached_prefix_are_of_its_forward(recorded: Served) -> None:
    block = block_of(recorded.llm)
    recorder.take(recorded.llm)
    prompt = random_prompt(40, 2 * block + 12)
    recorded.ask(prompt)
    (output,) = recorded.ask([*prompt, *random_prompt(41, 20)])
    assert output.num_cached_tokens == 2 * block
    assert_own_rows(recorded, output.outputs[0], len(prompt) + 20 + 7)
    silent, _ = ask_twice(recorded, prompt)
    assert silent.num_cached_tokens == 2 * block + HASH


def test_rows_of_a_cached_prefix_stay_those_of_its_weights(recorded: Served) -> None:
    """The weights change without a reset. A shorter prompt then computes some hash blocks again,
    and no KV block. The longer prompt's KV is of the old weights, and so are its rows."""
    block = block_of(recorded.llm)
    prompt = random_prompt(50, 2 * block + 1)
    (before,) = recorded.ask(prompt, max_tokens=1)
    recorded.llm.collective_rpc("spread_routers", args=(0.5,))
    recorder.take(recorded.llm)
    (part,) = recorded.ask(prompt[: 2 * HASH], max_tokens=1)
    (after,) = recorded.ask([*prompt, *random_prompt(51, 5)], max_tokens=1)
    assert part.num_cached_tokens == 0
    assert after.num_cached_tokens == 2 * block
    old, new, mixed = (output.outputs[0].routed_experts for output in (before, part, after))
    assert not np.array_equal(old[: len(new)], new)
    np.testing.assert_array_equal(mixed[: 2 * block], old[: 2 * block])


def test_rows_of_granite_are_those_of_transformers(checkpoint: Callable[..., Path]) -> None:
    layers = ["linear_attention", "full_attention"] * 2
    model = checkpoint("granitemoehybrid", layer_types=layers)
    prompts = [random_prompt(i, n) for i, n in enumerate((5, 2 * CHUNK + 9, 1))]
    with running(model, enable_prefix_caching=False) as llm:
        outputs = ask(llm, *prompts, max_tokens=BLOCK)
    assert_all_true(model, outputs)
