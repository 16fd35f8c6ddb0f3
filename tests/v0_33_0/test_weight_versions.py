# SPDX-License-Identifier: Apache-2.0
"""`examples/weight_versions.py`: rows, log-probs and versions of a rollout fit together. The oracle
is `transformers` with the weights of each version."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from examples.weight_versions import Span, roll_out, spans
from harness import oracle
from tests.behaviour.conftest import make_params, random_prompt
from tests.behaviour.test_weights import assert_agree, log_probs

pytestmark = pytest.mark.slow
PROMPT = random_prompt(910, 70)


def sample(checkpoints: list[Path]) -> Any:
    from vllm import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    arguments = AsyncEngineArgs(
        model=str(checkpoints[0]),
        dtype="float32",
        enforce_eager=True,
        max_model_len=1024,
        max_num_seqs=8,
        block_size=32,
        kv_cache_memory_bytes=64 << 20,
        enable_return_routed_experts=True,
    )

    async def run() -> Any:
        engine = AsyncLLM.from_engine_args(arguments)
        try:
            later = [(f"version {n}", str(path)) for n, path in enumerate(checkpoints[1:], 1)]
            params = make_params(max_tokens=40, logprobs=0)
            return await roll_out(engine, PROMPT, params, later, every=6)
        finally:
            engine.shutdown()

    return asyncio.run(run())


def test_rows_and_log_probs_of_each_version_are_those_of_its_weights(
    checkpoint: Callable[..., Path],
) -> None:
    checkpoints = [checkpoint(seed=seed, mlp_only_layers=[1]) for seed in (0, 1, 2)]
    output = sample(checkpoints)
    found: list[Span] = list(spans(output))
    assert [span.version for span in found] == ["default", "version 1", "version 2"]
    joined = [token for span in found for token in span.token_ids]
    assert joined == list(output.outputs[0].token_ids)
    tokens = [*PROMPT, *output.outputs[0].token_ids]
    begin = len(PROMPT) - 1
    for weights, span in zip(checkpoints, found, strict=True):
        end = begin + len(span.token_ids)
        assert_agree(span.rows, oracle.route(weights, tokens), begin)
        expected = log_probs(weights, tokens)[begin:end]
        np.testing.assert_allclose(span.logprobs, expected, atol=1e-4)
        begin = end
