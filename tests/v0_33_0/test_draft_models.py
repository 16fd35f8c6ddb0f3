# SPDX-License-Identifier: Apache-2.0
"""A draft model beside returned rows: rows are the target's, whatever the draft proposes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.behaviour.conftest import (
    BLOCK,
    CHUNK,
    ask,
    assert_rows,
    random_prompt,
    running,
)

if TYPE_CHECKING:
    from vllm import LLM

pytestmark = pytest.mark.slow

DRAFTS = 3


@pytest.fixture(scope="module")
def other(checkpoint: Callable[..., Path]) -> Path:
    """A MoE model of two layers that knows nothing of the target."""
    return checkpoint(seed=7, num_hidden_layers=2, num_experts=8)


@pytest.fixture(scope="module", params=[1.0, 0.0], ids=["accepted", "rejected"])
def speculating(
    request: pytest.FixtureRequest, model: Path, other: Path
) -> Iterator[tuple[LLM, float]]:
    """An engine, and the share of the drafts that the target accepts."""
    draft = model if request.param else other
    speculative = {"method": "draft_model", "model": str(draft), "num_speculative_tokens": DRAFTS}
    options = {"speculative_config": speculative, "disable_log_stats": False}
    with running(model, **options) as llm:
        yield llm, request.param


def test_rows_beside_a_moe_draft_model_are_the_targets(
    speculating: tuple[LLM, float], model: Path
) -> None:
    llm, share = speculating
    prompts = [random_prompt(i, n) for i, n in enumerate((9, 2 * CHUNK + 5, BLOCK))]
    outputs = ask(llm, *prompts, max_tokens=40)
    for prompt, output in zip(prompts, outputs, strict=True):
        (completion,) = output.outputs
        assert_rows(model, [*prompt, *completion.token_ids], completion.routed_experts)
    values = {m.name: m.value for m in llm.get_metrics() if hasattr(m, "value")}
    drafted = values["vllm:spec_decode_num_draft_tokens"]
    assert drafted > 0
    # Equal up to float32 noise, and to tokens that both models choose by chance.
    accepted = values["vllm:spec_decode_num_accepted_tokens"] / drafted
    assert abs(accepted - share) < 0.1
