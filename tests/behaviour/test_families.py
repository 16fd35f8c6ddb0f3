# SPDX-License-Identifier: Apache-2.0
"""Model families on the CPU engine: rows are the choices of their routers.

| family | oracle | why this one |
|---|---|---|
| Qwen3-MoE with a dense layer, Mixtral, OLMoE, GLM-4-MoE, Hunyuan, top-1, 300 experts |
  Hugging Face's routers | same forward pass up to float32 noise |
| DeepSeek-V2 and V3 | router logits of the same forward | vLLM's gate rounds V2's logits to
  bfloat16, Hugging Face's does not; MLA is off on a CPU |
| gpt-oss | router logits of the same forward | CPU kernels take bfloat16 only |
| Qwen3-Next | none | does not load on a CPU |
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from harness import oracle, recorder
from harness.choice import Choice
from tests.behaviour.conftest import (
    BLOCK,
    CHUNK,
    ask,
    assert_all_true,
    random_prompt,
    running,
)

if TYPE_CHECKING:
    from vllm import LLM
    from vllm.outputs import CompletionOutput, RequestOutput


@dataclass(frozen=True)
class Case:
    """A family's checkpoint, and the form of its rows."""

    family: str
    overrides: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    moe_layers: tuple[int, ...] = (0, 1, 2, 3)
    top_ks: tuple[int, ...] = (4, 4, 4, 4)
    experts: int = 16
    choice: Choice = field(default_factory=lambda: Choice(top_k=4))


BY_TRANSFORMERS = {
    "qwen3_moe": Case("qwen3_moe", {"mlp_only_layers": [2]}, moe_layers=(0, 1, 3)),
    "mixtral": Case("mixtral", top_ks=(2, 2, 2, 2), experts=8),
    "olmoe": Case("olmoe"),
    "glm4_moe": Case("glm4_moe", moe_layers=(1, 2, 3)),
    "hunyuan": Case("hunyuan_v1_moe", top_ks=(4, 2, 4, 3)),
    "top_1": Case("qwen3_moe", {"num_experts_per_tok": 1}, top_ks=(1, 1, 1, 1)),
    "300_experts": Case(
        "qwen3_moe",
        {"num_experts": 300, "moe_intermediate_size": 32, "num_hidden_layers": 2},
        moe_layers=(0, 1),
        top_ks=(4, 4),
        experts=300,
    ),
}
GROUPED = {"n_group": 4, "topk_group": 2}
BY_OWN_LOGITS = {
    "deepseek_v2": Case(
        "deepseek_v2",
        {**GROUPED, "topk_method": "group_limited_greedy"},
        moe_layers=(1, 2, 3),
        choice=Choice(top_k=4, groups=4, top_groups=2),
    ),
    "deepseek_v3": Case(
        "deepseek_v3",
        GROUPED,
        moe_layers=(1, 2, 3),
        choice=Choice(top_k=4, groups=4, top_groups=2, scoring="sigmoid"),
    ),
    "gpt_oss": Case("gpt_oss", options={"dtype": "bfloat16"}),
}


@dataclass(frozen=True)
class Served:
    case: Case
    model: Path
    llm: LLM

    def ask(self, *prompts: list[int], max_tokens: int = 8) -> list[RequestOutput]:
        return ask(self.llm, *prompts, max_tokens=max_tokens)


@contextmanager
def serving(case: Case, checkpoint: Callable[..., Path], **options: Any) -> Iterator[Served]:
    model = checkpoint(case.family, **case.overrides)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_MLA_DISABLE", "1")
        with running(model, **case.options, **options) as llm:
            yield Served(case, model, llm)


@pytest.fixture(scope="module", params=BY_TRANSFORMERS)
def served(request: pytest.FixtureRequest, checkpoint: Callable[..., Path]) -> Iterator[Served]:
    with serving(BY_TRANSFORMERS[request.param], checkpoint) as served:
        yield served


@pytest.fixture(scope="module", params=BY_OWN_LOGITS)
def recorded(request: pytest.FixtureRequest, checkpoint: Callable[..., Path]) -> Iterator[Served]:
    extension = "harness.recorder.Recorder"
    case = BY_OWN_LOGITS[request.param]
    with serving(case, checkpoint, worker_extension_cls=extension) as served:
        served.llm.collective_rpc("record_start")
        yield served


def assert_form(case: Case, completion: CompletionOutput) -> None:
    """Layers, top-k, dtype and the range of ids are the model's."""
    rows = completion.routed_experts
    assert rows is not None
    assert rows.shape[1:] == (len(case.top_ks), max(case.top_ks))
    assert rows.dtype == (np.uint8 if case.experts <= 256 else np.uint16)
    assert tuple(completion.moe_layers) == case.moe_layers  # a list on v0.33.0
    top_ks = completion.moe_top_k
    differ = len(set(case.top_ks)) > 1
    assert (top_ks and tuple(top_ks)) == (case.top_ks if differ else None)
    assert 0.9 * (case.experts - 1) < rows.max() < case.experts
    for layer, top_k in enumerate(case.top_ks):
        if layer not in case.moe_layers:
            assert not rows[:, layer].any()
            continue
        distinct = np.sort(rows[:, layer, :top_k], axis=-1)
        assert (np.diff(distinct.astype(int), axis=-1) > 0).all()
        assert (rows[:, layer, top_k:] == rows[:, layer, top_k - 1 : top_k]).all()


def assert_own_rows(served: Served, completion: CompletionOutput, count: int) -> None:
    """The rows are the choice of the logits that the engine computed."""
    from safetensors.numpy import load_file

    logits = recorder.take(served.llm)
    assert tuple(logits) == served.case.moe_layers
    biases = {}
    if served.case.choice.scoring == "sigmoid":
        weights = load_file(served.model / "model.safetensors")
        for layer in logits:
            biases[layer] = weights[f"model.layers.{layer}.mlp.gate.e_score_correction_bias"]
    routes = served.case.choice.routes(logits, len(served.case.top_ks), biases)
    rows = completion.routed_experts
    assert rows is not None
    assert len(rows) == count
    # The same logits: only equal ones are tied.
    comparison = oracle.compare(rows, routes, tie=1e-7)
    undecided = served.case.choice.undecided(logits, biases)
    wrong = [d for d in comparison.disagreements if (d.position, d.layer) not in undecided]
    assert not wrong, wrong[0]
    # bfloat16 has few values between neighbours.
    assert comparison.ties + len(undecided) < 0.05 * comparison.decisions


def test_rows_of_a_batch_are_those_of_transformers(served: Served) -> None:
    prompts = [random_prompt(i, n) for i, n in enumerate((5, 2 * CHUNK + 9, 40, 1))]
    assert_all_true(served.model, served.ask(*prompts))


def test_rows_behind_a_cached_prefix_are_those_of_transformers(served: Served) -> None:
    prompt = random_prompt(10, 2 * BLOCK + 5)
    (first,) = served.ask(prompt, max_tokens=BLOCK)
    conversation = [*prompt, *first.outputs[0].token_ids, *random_prompt(11, 7)]
    (second,) = served.ask(conversation)
    assert second.num_cached_tokens >= 2 * BLOCK
    assert_all_true(served.model, [first, second])


def test_rows_have_the_form_of_the_model(served: Served) -> None:
    (output,) = served.ask(random_prompt(20, 3 * CHUNK))
    assert_form(served.case, output.outputs[0])


def test_rows_are_what_the_logits_of_the_same_forward_choose(recorded: Served) -> None:
    recorder.take(recorded.llm)
    (output,) = recorded.ask(random_prompt(30, 3 * CHUNK + 5), max_tokens=40)
    assert_own_rows(recorded, output.outputs[0], 3 * CHUNK + 5 + 39)


def test_rows_behind_a_cached_prefix_are_of_the_forward_that_made_it(recorded: Served) -> None:
    recorder.take(recorded.llm)
    prompt = random_prompt(40, 4 * BLOCK + 3)
    recorded.ask(prompt)
    (output,) = recorded.ask([*prompt, *random_prompt(41, 20)])
    assert output.num_cached_tokens == 4 * BLOCK
    assert_own_rows(recorded, output.outputs[0], 4 * BLOCK + 23 + 7)


def test_rows_of_own_logits_have_the_form_of_the_model(recorded: Served) -> None:
    (output,) = recorded.ask(random_prompt(50, 3 * CHUNK))
    assert_form(recorded.case, output.outputs[0])
