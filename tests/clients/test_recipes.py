# SPDX-License-Identifier: Apache-2.0
"""Recipes of `examples/clients`, without the clients' packages."""

from __future__ import annotations

import base64
import re
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from examples.client import Completion, RoutedExpertsError, join
from examples.clients import turns
from examples.clients.megatron_replay import router_targets
from examples.clients.prime_rl_answers import reencode
from examples.clients.turns import join_turns
from tests.clients.conftest import RECIPES, ROOT, commands
from tests.clients.driving import encode, indented_block

PAGE = (ROOT / "docs" / "clients.md").read_text(encoding="utf-8")
LAYERS, TOP_K = 3, 4
# What a user and a tool said.
TURNS = [[0, 1, 2], [7, 8], [13]]


def make_rows(count: int, seed: int = 0) -> Any:
    """Distinct ids in layers 1 and 2; layer 0 is dense."""
    rng = np.random.default_rng(seed)
    rows = np.zeros((count, LAYERS, TOP_K), np.uint8)
    for position in range(count):
        for layer in (1, 2):
            rows[position, layer] = rng.permutation(16)[:TOP_K]
    return rows


def make_turn(prompt: int, tokens: int, start: int = 0, all_rows: Any = None) -> Completion:
    """A turn of a conversation whose token at position p is p."""
    rows = make_rows(64) if all_rows is None else all_rows
    end = prompt + tokens
    return Completion(
        prompt=tuple(range(prompt)),
        token_ids=tuple(range(prompt, end)),
        logprobs=(),
        rows=rows[start : end - 1],
        start=start,
        moe_layers=(1, 2),
        finish_reason="length",
    )


def fake_generate(url: str, prompt: list[int], sampling: Any, *, start: int) -> list[Completion]:
    """A server that answers each turn with four tokens."""
    return [make_turn(len(prompt), 4, start)]


def test_loop_of_several_turns_gets_all_rows() -> None:
    code = indented_block(turns.__doc__)
    names = {**vars(turns), "generate": fake_generate, "url": "", "environment": TURNS}
    exec(code, names)
    np.testing.assert_array_equal(names["rows"], make_rows(64)[: len(names["said"]) - 1])
    assert len(names["said"]) == sum(map(len, TURNS)) + 4 * len(TURNS)


def test_page_for_trainer_teams_asks_for_the_rows_behind_those_of_the_turn_before() -> None:
    (code,) = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    names: dict[str, Any] = {"generate": fake_generate, "url": "", "said": [0, 1, 2], "new": [3]}
    exec(code, names)
    assert names["turn"].start == 2


def test_cast_for_nemo_rl_gives_torch_rows_that_it_can_take_the_maximum_of() -> None:
    completion = SimpleNamespace(routed_experts=make_rows(5).astype(np.uint16) + 256)
    with pytest.raises(RuntimeError, match="UInt16"):
        torch.from_numpy(completion.routed_experts).max()
    (code,) = commands("NeMo-RL", "python")
    names: dict[str, Any] = {"completion": completion}
    exec(code, names)
    assert torch.from_numpy(names["routed_experts"]).max() == completion.routed_experts.max()


def test_bytes_for_slime_are_those_that_it_decodes() -> None:
    (code,) = re.findall(r"`(rows\.\S+)`", RECIPES)
    rows = make_rows(5)
    sent = eval(code, {"rows": rows})
    np.testing.assert_array_equal(np.frombuffer(sent, np.int32).reshape(rows.shape), rows)


def test_turns_that_ask_for_all_rows_keep_the_earlier_ones() -> None:
    later = make_rows(64, seed=1)
    whole = join_turns([make_turn(5, 3), make_turn(12, 4, all_rows=later)])
    np.testing.assert_array_equal(whole.rows[:7], make_rows(64)[:7])
    np.testing.assert_array_equal(whole.rows[7:], later[7:15])


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        pytest.param(
            {"start": 8}, "start at position 8; those before it end at 7", id="row left out"
        ),
        pytest.param(
            {"prompt": tuple(range(1, 13))}, "not continue the 8 tokens", id="other conversation"
        ),
    ],
)
def test_turn_that_does_not_join_is_refused(changes: dict[str, Any], told: str) -> None:
    with pytest.raises(RoutedExpertsError, match=told):
        join_turns([make_turn(5, 3), replace(make_turn(12, 4, start=7), **changes)])


@pytest.mark.parametrize("top_k", [(4, 4), (4, 2)])
def test_router_targets_are_those_of_the_layers_that_route(top_k: tuple[int, int]) -> None:
    """Tokens without a row get distinct experts."""
    completion = replace(make_turn(5, 3), moe_top_k=top_k)
    for layer, k, target in zip((1, 2), top_k, router_targets(completion, 10), strict=True):
        assert target.dtype == torch.int32
        np.testing.assert_array_equal(target[:7], completion.rows[:, layer, :k])
        assert target[7:].tolist() == [[*range(k)]] * 3


@pytest.mark.parametrize("turn", [make_turn(5, 3, start=2), make_turn(5, 3, all_rows=make_rows(6))])
def test_router_targets_want_all_rows(turn: Completion) -> None:
    with pytest.raises(ValueError, match=r"\d rows from position \d; wanted one for each token"):
        router_targets(turn, 8)


@pytest.mark.parametrize("times", [1, 2])
def test_reencoded_answer_has_the_same_rows_and_states_their_start(times: int) -> None:
    choice = {"index": 0, "routed_experts_start": 3, "routed_experts": encode(make_rows(5))}
    for _ in range(times):
        (choice,) = reencode({"choices": [choice]})["choices"]
    sent: Any = choice["routed_experts"]
    rows = np.frombuffer(base64.b64decode(sent["data"]), sent["dtype"]).reshape(sent["shape"])
    np.testing.assert_array_equal(rows, make_rows(5))
    assert sent["start"] == 3


def test_answer_that_was_aborted_without_rows_says_so() -> None:
    aborted = {"choices": [{"index": 0, "token_ids": [], "finish_reason": "abort"}]}
    with pytest.raises(RoutedExpertsError, match="aborted before it had rows"):
        join([1, 2], [aborted])
