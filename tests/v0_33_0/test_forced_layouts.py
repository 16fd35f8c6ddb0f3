# SPDX-License-Identifier: Apache-2.0
"""Forced routed experts beside what spreads, skips or changes the computation of a prompt.

The oracle is `transformers`, as in `test_forced_routed_experts.py`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from tests.behaviour.conftest import BLOCK, OPTIONS, make_params, random_prompt, running
from tests.behaviour.test_layouts import workers
from tests.behaviour.test_speculative import SPECULATIVE, repetitive_prompt
from tests.v0_33_0.test_forced_routed_experts import (
    CLOSE,
    FORCED,
    Served,
    assert_forced,
    assert_same,
    give,
    new_log_probs,
    rows_of,
)

if TYPE_CHECKING:
    from vllm.outputs import RequestOutput

pytestmark = pytest.mark.slow

MOE_LAYERS = [0, 2, 3]


def test_every_stage_is_forced(model: Path) -> None:
    """In chunks, beside a neighbour, and behind a prefix hit."""
    with workers(model, **FORCED, pipeline_parallel_size=2) as llm:
        served = Served(model, llm, MOE_LAYERS)
        prompt = random_prompt(40, 300)
        (own,) = served.ask(prompt)
        served.forget()
        (again,) = served.ask(give(prompt, rows_of(own)[:300]))
        assert_same(own, again)
        rows = served.random_rows(300)
        forced, _ = served.ask(give(prompt, rows), random_prompt(41, 90), prompt_logprobs=None)
        assert_forced(served, forced, rows)
        other = rows.copy()
        other[200:] = served.random_rows(100, seed=1)
        (hit,) = served.ask(give(prompt, other), prompt_logprobs=None)
        assert hit.num_cached_tokens == 200 // BLOCK * BLOCK
        assert_forced(served, hit, other)


@pytest.mark.parametrize("method", ["ngram", "draft_model"])
def test_drafts_are_not_forced(model: Path, method: str) -> None:
    """The target computes with the rows, and checks drafts that nobody forced. The draft model
    routes too."""
    of_method = {"ngram": SPECULATIVE["ngram"], "draft_model": {"model": str(model)}}[method]
    speculative = {"method": method, "num_speculative_tokens": 3, **of_method}
    options = {"speculative_config": speculative, "disable_log_stats": False}
    with running(model, **FORCED, **options) as llm:
        served = Served(model, llm, MOE_LAYERS)
        prompt = repetitive_prompt(43, 100)
        rows = served.random_rows(100)
        forced, own = served.ask(give(prompt, rows), prompt, max_tokens=30)
        assert_forced(served, forced, rows)
        assert new_log_probs(forced) != new_log_probs(own)
        values = {m.name: m.value for m in llm.get_metrics() if hasattr(m, "value")}
        assert values["vllm:spec_decode_num_accepted_tokens"]
        if method == "draft_model":
            (found,) = llm.collective_rpc(count_forced_routers)
            assert found == (len(MOE_LAYERS), 0)


def count_forced_routers(wrapper: Any) -> tuple[int, ...]:
    """Routers that take given experts, of the target and of the draft model."""
    runner = wrapper.worker.model_runner
    return tuple(
        sum(
            getattr(getattr(module, "router", None), "force_fn", None) is not None
            for module in model.modules()
        )
        for model in (runner.model, runner.speculator.model)
    )


def test_prompt_of_embeddings_is_forced(model: Path) -> None:
    with running(model, **FORCED, enable_prompt_embeds=True) as llm:
        served = Served(model, llm, MOE_LAYERS)
        tokens = random_prompt(45, 100)
        embeds = served.reference.get_input_embeddings().weight[tokens].detach()
        rows = served.random_rows(70)
        given = {"forced_routed_experts": rows, "forced_routed_experts_start": 20}
        for cached in (0, 100 // BLOCK * BLOCK):
            (forced,) = served.ask({"prompt_embeds": embeds, **given}, prompt_logprobs=None)
            assert forced.num_cached_tokens == cached
            assert (rows_of(forced)[20:90, MOE_LAYERS] == rows[:, MOE_LAYERS]).all()
            new = forced.outputs[0].token_ids
            expected = served.log_probs([*tokens, *new[:-1]], rows_of(forced)[:100])
            for at, found in enumerate(new_log_probs(forced)):
                assert max(abs(float(expected[99 + at][t]) - p) for t, p in found.items()) < CLOSE


def test_first_part_of_a_session_is_forced(model: Path) -> None:
    """Later parts are routed, and may not bring rows."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.engine.protocol import StreamingInput
    from vllm.sampling_params import RequestOutputKind
    from vllm.v1.engine.async_llm import AsyncLLM

    served = Served(model, None, MOE_LAYERS)
    parts = [random_prompt(46, 70), random_prompt(47, 20)]
    rows = served.random_rows(60)

    async def converse(engine: AsyncLLM, *prompts: Any) -> list[RequestOutput]:
        async def stream() -> AsyncIterator[StreamingInput]:
            for prompt in prompts:
                yield StreamingInput(prompt)

        params = make_params(logprobs=3, output_kind=RequestOutputKind.DELTA, max_tokens=4)
        return [output async for output in engine.generate(stream(), params, "session")]

    async def check() -> None:
        engine = AsyncLLM.from_engine_args(AsyncEngineArgs(str(model), **{**OPTIONS, **FORCED}))
        try:
            # vLLM adds later parts to the list of the first one.
            later = {"prompt_token_ids": parts[1]}
            outputs = await converse(engine, give([*parts[0]], rows, 5), later)
            returned = np.concatenate(
                [
                    o.outputs[0].routed_experts
                    for o in outputs
                    if o.outputs[0].routed_experts is not None
                ]
            )
            assert (returned[5:65, MOE_LAYERS] == rows[:, MOE_LAYERS]).all()
            new = [t for o in outputs for t in o.outputs[0].token_ids]
            assert len(new) == 8
            # A session drops the last token of each part.
            tokens = [*parts[0], *new[:3], *parts[1], *new[4:7]]
            expected = served.log_probs(tokens, returned[: len(tokens)])
            places = [*range(69, 73), *range(92, 96)]
            found = [each for o in outputs for each in o.outputs[0].logprobs]
            worst = [
                max(abs(float(expected[at][t]) - p.logprob) for t, p in of_token.items())
                for at, of_token in zip(places, found, strict=True)
            ]
            assert max(worst) < CLOSE, (worst, len(returned))
            with pytest.raises(Exception, match="later part of a session"):
                await converse(engine, {"prompt_token_ids": [*parts[0]]}, give(parts[1], rows[:20]))
        finally:
            engine.shutdown()

    asyncio.run(check())
