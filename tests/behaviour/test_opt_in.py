# SPDX-License-Identifier: Apache-2.0
"""Every request decides whether it gets rows, without effect on others."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from harness.lines import LINES, installed
from tests.behaviour.conftest import (
    as_prompts,
    ask,
    make_params,
    random_prompt,
    running,
    scheduler_of,
)

if TYPE_CHECKING:
    from vllm import LLM, RequestOutput

PROMPTS = [random_prompt(700 + i, n) for i, n in enumerate((5, 90, 33, 150, 64, 2))]


@pytest.fixture(scope="module")
def llm(model: Path) -> Iterator[LLM]:
    """An opt-in engine. Without the prefix cache, its schedule does not depend on who asks, so
    tokens and logprobs must be bitwise equal."""
    with running(model, routed_experts_opt_in=True, enable_prefix_caching=False) as llm:
        yield llm


@pytest.fixture(scope="module")
def off(model: Path) -> Iterator[LLM]:
    """The same engine without the feature."""
    options = {"enable_return_routed_experts": False, "enable_prefix_caching": False}
    with running(model, **options) as off:
        yield off


def generate(llm: LLM, *extra_args: dict[str, Any] | None) -> list[RequestOutput]:
    each = [{"extra_args": own} for own in extra_args]
    return ask(llm, *PROMPTS[: len(each)], each=each, logprobs=3)


def test_tokens_and_logprobs_are_the_same_whoever_asks(llm: LLM, off: LLM) -> None:
    asks = {"return_routed_experts": True}
    batches = [generate(llm, *who) for who in ([asks] * 6, [None] * 6, [asks, None] * 3)]
    expected = generate(off, *[None] * 6)
    for outputs in batches:
        for got, want in zip(outputs, expected, strict=True):
            assert got.outputs[0].token_ids == want.outputs[0].token_ids
            assert got.outputs[0].logprobs == want.outputs[0].logprobs


def test_leftover_arguments_do_not_reach_a_worker_without_the_feature(off: LLM) -> None:
    """A request from elsewhere may bypass the input processor."""
    engine = off.llm_engine
    params = make_params()
    request = engine.input_processor.process_inputs(
        "made elsewhere", as_prompts(PROMPTS[0])[0], params, supported_tasks=("generate",)
    )
    asks = {"return_routed_experts": True, "routed_experts_prompt_start": 0}
    request.sampling_params.extra_args = dict(asks)
    for name, value in asks.items():
        setattr(request.sampling_params, name, value)
    engine.add_request(request.request_id, request, params)
    outputs: list[Any] = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    assert len(outputs[-1].outputs[0].token_ids) == 6
    assert outputs[-1].outputs[0].routed_experts is None


def test_beam_search_goes_without_rows(model: Path) -> None:
    from vllm.sampling_params import BeamSearchParams

    with running(model) as engine:
        params = BeamSearchParams(beam_width=2, max_tokens=3)
        (output,) = engine.beam_search(as_prompts(PROMPTS[0]), params)
        assert len(output.sequences) == 2
        if not LINES[installed()].tests["scheduler_keeps_rows"]:
            return
        manager = scheduler_of(engine).routed_experts
        assert not manager.requests
        assert (manager.rows.cached_step == np.iinfo(np.int64).max).all()
