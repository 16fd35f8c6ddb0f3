# SPDX-License-Identifier: Apache-2.0
"""Every request decides whether it gets rows, without effect on others."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.behaviour.conftest import (
    ask,
    random_prompt,
    running,
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
