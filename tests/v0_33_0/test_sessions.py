# SPDX-License-Identifier: Apache-2.0
"""Weights change between the parts of a session. v0.20.2 refuses sessions with rows."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness import oracle
from tests.behaviour.conftest import OPTIONS, make_params, random_prompt
from tests.behaviour.test_weights import assert_agree

pytestmark = pytest.mark.slow
FIRST, SECOND = random_prompt(940, 70), random_prompt(941, 40)
NEW = 6


def talk(model: Path, other: Path) -> list[Any]:
    """The outputs of a session. Its second part begins after the weights have changed."""
    from vllm import AsyncEngineArgs
    from vllm.engine.protocol import StreamingInput
    from vllm.sampling_params import RequestOutputKind
    from vllm.v1.engine.async_llm import AsyncLLM

    params = make_params(
        max_tokens=NEW, output_kind=RequestOutputKind.DELTA, return_routed_experts=True
    )

    async def run() -> list[Any]:
        engine = AsyncLLM.from_engine_args(AsyncEngineArgs(model=str(model), **OPTIONS))
        changed = asyncio.Event()

        async def parts() -> AsyncIterator[StreamingInput]:
            # The engine appends the next part to this list.
            yield StreamingInput({"prompt_token_ids": [*FIRST]}, params)
            await changed.wait()
            yield StreamingInput({"prompt_token_ids": SECOND}, params)

        outputs = []
        try:
            async for output in engine.generate(parts(), params, "session"):
                outputs.append(output)
                sampled = sum(len(output.outputs[0].token_ids) for output in outputs)
                if sampled == NEW and not changed.is_set():
                    await engine.pause_generation(mode="keep", clear_cache=False)
                    await engine.collective_rpc(
                        "reload_weights", kwargs={"weights_path": str(other)}
                    )
                    await engine.resume_generation()
                    changed.set()
            return outputs
        finally:
            engine.shutdown()

    return asyncio.run(run())


def test_later_part_of_a_session_has_rows_of_the_new_weights_over_the_old_kv(
    model: Path, checkpoint: Callable[..., Path]
) -> None:
    other = checkpoint(seed=1, mlp_only_layers=[1])
    completions = [output.outputs[0] for output in talk(model, other)]
    sampled = [token for completion in completions for token in completion.token_ids]
    # A session goes on without the last token of a part.
    old = [*FIRST, *sampled[: NEW - 1]]
    tokens = [*old, *SECOND, *sampled[NEW:]]
    rows = np.concatenate([completion.routed_experts for completion in completions])
    assert len(rows) == len(tokens) - 1
    assert_agree(rows, oracle.route_in_turns((model, old), (other, tokens[len(old) :])))
    for alone in (model, other):
        assert oracle.compare(rows, oracle.route(alone, tokens)).disagreements
