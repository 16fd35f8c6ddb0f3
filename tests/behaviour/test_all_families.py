# SPDX-License-Identifier: Apache-2.0
"""Every family that `transformers` and this line share and that runs on a CPU: every row is what
the router of `transformers` selects.

Families whose rows need another oracle, the logits of the same forward, are in `test_families.py`:
DeepSeek-V2 and V3, and gpt-oss.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pytest

from harness import oracle
from harness.checkpoint import family_of
from harness.lines import LINES, installed
from tests.behaviour.conftest import (
    BLOCK,
    CHUNK,
    ENGINES,
    ask,
    assert_all_true,
    random_prompt,
    running,
)

if TYPE_CHECKING:
    from vllm.outputs import CompletionOutput, RequestOutput

pytestmark = ENGINES

LARGE = {"num_experts": 300, "moe_intermediate_size": 32, "num_hidden_layers": 2}
TESTS = LINES[installed()].tests
CASES = {
    **{family: (family, overrides) for family, overrides in TESTS["families"].items()},
    "top_1": ("qwen3_moe", {"num_experts_per_tok": 1}),
    "300_experts": ("qwen3_moe", LARGE),
}
QUICK = (*TESTS["quick_families"], "top_1", "300_experts")


class Answered(NamedTuple):
    """A model, and its answers to a batch and to a prompt that begins with a cached one."""

    model: Path
    batch: list[RequestOutput]
    after_prefix: RequestOutput


def answer(model: Path, **options: Any) -> Answered:
    prompts = [random_prompt(i, n) for i, n in enumerate((5, 2 * CHUNK + 9, 1))]
    if family_of(model).vision is not None:
        # The checkpoint has no image processor.
        options["limit_mm_per_prompt"] = {"image": 0, "video": 0}
    # An engine that runs a model of `transformers` changes its class for the whole process: load
    # the oracle first.
    oracle.load(model)
    with running(model, **options) as llm:
        batch = ask(llm, *prompts, max_tokens=BLOCK)
        conversation = [*prompts[1], *batch[1].outputs[0].token_ids, *random_prompt(9, 7)]
        return Answered(model, batch, ask(llm, conversation)[0])


@pytest.fixture(
    scope="module",
    params=[pytest.param(c, marks=[] if c in QUICK else pytest.mark.slow) for c in CASES],
)
def answered(request: pytest.FixtureRequest, checkpoint: Callable[..., Path]) -> Answered:
    family, overrides = CASES[request.param]
    # vLLM runs some families through their classes in `transformers`, and newer releases change
    # these classes for the compiler. The oracle uses the same classes. Nothing is compiled here.
    base = "vllm.model_executor.models.transformers.base.Base"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(f"{base}._decorate_for_torch_compile", lambda self: None, raising=False)
        return answer(checkpoint(family, **overrides))


def assert_form(
    completion: CompletionOutput, layers: Sequence[int], top_ks: Sequence[int], experts: int
) -> None:
    """Layers, top-k (of every decoder layer), dtype and the range of ids are the model's."""
    rows = completion.routed_experts
    assert rows is not None
    assert rows.shape[1:] == (len(top_ks), max(top_ks))
    assert rows.dtype == (np.uint8 if experts <= 256 else np.uint16)
    assert tuple(completion.moe_layers) == tuple(layers)  # a list on v0.33.0
    differ = len(set(top_ks)) > 1
    told = [top_ks[layer] for layer in layers] if differ else None
    assert (completion.moe_top_k and list(completion.moe_top_k)) == told
    assert 0.9 * (experts - 1) < rows.max() < experts
    for layer, top_k in enumerate(top_ks):
        if layer not in layers:
            assert not rows[:, layer].any()
            continue
        distinct = np.sort(rows[:, layer, :top_k], axis=-1)
        assert (np.diff(distinct.astype(int), axis=-1) > 0).all()
        assert (rows[:, layer, top_k:] == rows[:, layer, top_k - 1 : top_k]).all()


def test_rows_of_a_batch_are_what_the_routers_of_transformers_select(answered: Answered) -> None:
    assert_all_true(answered.model, answered.batch)


def test_rows_after_a_cached_prefix_are_what_the_routers_select(
    answered: Answered, line: str
) -> None:
    if LINES[line].tests["finds_prefixes"]:
        assert answered.after_prefix.num_cached_tokens >= 4 * BLOCK
    assert_all_true(answered.model, [answered.after_prefix])


def test_rows_have_the_form_of_the_model(answered: Answered) -> None:
    model = oracle.load(answered.model)
    completion = answered.batch[1].outputs[0]
    assert_form(completion, model.layers, model.top_ks, model.num_experts)
