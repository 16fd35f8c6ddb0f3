# SPDX-License-Identifier: Apache-2.0
"""Families whose rows need another oracle on a line than the routers of `transformers`
(`test_all_families.py`): the router logits of the same forward. `upstream.toml` lists them, and
says why.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from harness import oracle, recorder
from harness.choice import Choice
from harness.lines import LINES, installed
from tests.behaviour.conftest import BLOCK, CHUNK, ENGINES, ask, random_prompt, running
from tests.behaviour.test_all_families import assert_form

if TYPE_CHECKING:
    from vllm import LLM
    from vllm.outputs import CompletionOutput, RequestOutput

pytestmark = ENGINES


@dataclass(frozen=True)
class Case:
    """A family's checkpoint, of four layers, and how it chooses from 16 experts."""

    family: str
    overrides: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    moe_layers: tuple[int, ...] = (0, 1, 2, 3)
    choice: Choice = field(default_factory=lambda: Choice(top_k=4))

    @classmethod
    def read(cls, family: str) -> Case:
        """The case of `upstream.toml`."""
        said = dict(CASES[family])
        choice = Choice(top_k=4, **said.pop("choice", {}))
        layers = tuple(said.pop("moe_layers", (0, 1, 2, 3)))
        return cls(family, **said, moe_layers=layers, choice=choice)


LAYERS = 4
CASES = LINES[installed()].tests["own_logits"]


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


@pytest.fixture(scope="module", params=CASES)
def recorded(request: pytest.FixtureRequest, checkpoint: Callable[..., Path]) -> Iterator[Served]:
    extension = "harness.recorder.Recorder"
    case = Case.read(request.param)
    with serving(case, checkpoint, worker_extension_cls=extension) as served:
        served.llm.collective_rpc("record_start")
        yield served


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
    routes = served.case.choice.routes(logits, LAYERS, biases)
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
    assert_form(output.outputs[0], recorded.case.moe_layers, [4] * LAYERS, experts=16)
