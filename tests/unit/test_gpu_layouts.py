# SPDX-License-Identifier: Apache-2.0
"""The comparisons of `make layouts`, without engines: they must find broken rows."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from examples.client import Completion
from gpu.layouts import cells
from gpu.layouts.answers import (
    Failed,
    Logits,
    check_answers,
    check_own_logits,
    check_reference,
    gather_logits,
)
from harness.server import NO_ROWS

LAYERS = 2
EXPERTS = 16
TOP_K = 4
TOKENS = 3


def make_logits() -> Logits:
    rng = np.random.default_rng(0)
    shapes = {index: (length + TOKENS, EXPERTS) for index, length in enumerate(cells.LENGTHS)}
    return {
        index: {layer: rng.normal(size=shape).astype(np.float32) for layer in range(LAYERS)}
        for index, shape in shapes.items()
    }


def route(logits: Logits) -> dict[int, Completion]:
    answers = {}
    for index, by_layer in logits.items():
        ids = [np.argsort(-layer[:-1], 1)[:, :TOP_K] for layer in by_layer.values()]
        rows = np.stack(ids, 1).astype(np.uint8) if cells.asks(index) else NO_ROWS
        answers[index] = Completion((), (1,) * TOKENS, (), rows, 0, tuple(by_layer))
    return answers


def exchange(answer: Completion, position: int, layer: int, logits: Logits, index: int) -> None:
    """Replace the k-th expert by the next one, whose logit becomes nearly equal."""
    order = np.argsort(-logits[index][layer][position])
    logits[index][layer][position, order[TOP_K]] = (
        logits[index][layer][position, order[TOP_K - 1]] - 0.001
    )
    answer.rows[position, layer, TOP_K - 1] = order[TOP_K]


def test_true_rows_agree() -> None:
    logits = make_logits()
    answers = route(logits)
    rows = check_answers(answers, LAYERS, TOKENS)
    assert check_own_logits(answers, logits) == rows * LAYERS
    assert check_reference(answers, route(logits), logits)["differ"] == 0


def test_rows_that_are_not_the_top_k_of_the_logits_are_noticed() -> None:
    logits = make_logits()
    answers = route(logits)
    exchange(answers[1], 200, 1, logits, 1)
    with pytest.raises(Failed, match=r"prompt 1, layer 1: 1 of 302 rows .* position 200"):
        check_own_logits(answers, logits)
    late = replace(answers[0], rows=np.roll(answers[0].rows, 1, axis=0))
    with pytest.raises(Failed, match="prompt 0, layer 0"):
        check_own_logits({**answers, 0: late}, logits)


def test_a_repeated_expert_and_missing_rows_are_noticed() -> None:
    answers = route(make_logits())
    answers[0].rows[2, 1, 0] = answers[0].rows[2, 1, 1]
    with pytest.raises(Failed, match="prompt 0: an expert twice"):
        check_answers(answers, LAYERS, TOKENS)
    answers[0] = replace(answers[0], rows=answers[0].rows[1:])
    with pytest.raises(Failed, match="prompt 0: 6 rows"):
        check_answers(answers, LAYERS, TOKENS)


def test_close_decisions_may_differ_from_one_gpu() -> None:
    logits = make_logits()
    reference = route(logits)
    answers = route(logits)
    exchange(answers[1], 200, 0, logits, 1)
    # Another expert in an earlier layer turns later layers, at this and later positions.
    answers[1].rows[250, 1] = np.setdiff1d(np.arange(EXPERTS), reference[1].rows[250, 1])[:TOP_K]
    result = check_reference(answers, reference, logits)
    assert (result["differ"], result["first_differ"]) == (2, 1)
    assert result["greatest_margin"] == pytest.approx(0.001, rel=0.01)


def test_decisions_that_are_not_close_must_not_differ() -> None:
    logits = make_logits()
    answers = route(logits)
    answers[1].rows[100, 1] = np.setdiff1d(np.arange(EXPERTS), answers[1].rows[100, 1])[:TOP_K]
    with pytest.raises(Failed, match="margin"):
        check_reference(answers, route(logits), logits)


def write_rank(folder: Path, tp: int, logits: np.ndarray, positions: np.ndarray) -> None:
    first = cells.make_prompts()[0][0]
    meta = {
        "ranks": {"dp": 0, "pp": 0, "tp": tp},
        "moved": False,
        "steps": [{"first": [first], "starts": [0, 3]}],
    }
    np.savez(
        folder / f"logits0-dp0-pp0-tp{tp}.npz",
        **{"meta": np.array(json.dumps(meta)), "0/positions": positions, "0/1": logits},
    )


def test_chunks_of_sequence_parallel_ranks_are_joined(tmp_path: Path) -> None:
    """Three tokens in two chunks, the last padded."""
    logits = np.arange(4 * EXPERTS, dtype=np.float32).reshape(4, EXPERTS)
    for rank in range(2):
        write_rank(tmp_path, rank, logits[2 * rank : 2 * rank + 2], np.array([4, 5, 6]))
    gathered, _ = gather_logits(tmp_path)
    np.testing.assert_array_equal(gathered[0][1][4:7], logits[:3])
    assert np.isnan(gathered[0][1][:4]).all()
