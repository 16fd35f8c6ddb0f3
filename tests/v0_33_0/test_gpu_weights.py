# SPDX-License-Identifier: Apache-2.0
"""The comparison of `python -m gpu.weights`, without engines: it must find wrong weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gpu.weights import compare
from harness import oracle
from harness.weights import WAYS, weigh

TOKENS = list(range(10, 40))


@pytest.fixture(scope="module")
def model(checkpoint: Callable[..., Path]) -> Path:
    return checkpoint(**WAYS["qwen3_moe"][0])


@pytest.fixture
def answer(model: Path) -> dict[str, Any]:
    """What an engine would save."""
    routers = oracle.load(model)
    rows = np.zeros((len(TOKENS) - 1, routers.num_layers, routers.top_k), np.uint8)
    weights = np.zeros(rows.shape, np.float32)
    for layer, all_expected in weigh(model, TOKENS).items():
        expected = all_expected[:-1]
        chosen = np.argsort(-expected, axis=1)[:, : routers.top_k]
        rows[:, layer] = chosen
        weights[:, layer] = np.take_along_axis(expected, chosen, axis=1)
    return {"tokens": TOKENS, "rows": rows, "weights": weights, "cached": 3}


def result_of(model: Path, folder: Path, answer: dict[str, Any], dtype: str) -> dict[str, Any]:
    np.savez(folder / "cold-0-0.npz", **answer)
    return compare(model, folder, 1.0, ("qwen3_moe", dtype, "one"))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_true_weights_are_right(
    model: Path, tmp_path: Path, answer: dict[str, Any], dtype: str
) -> None:
    result = result_of(model, tmp_path, answer, dtype)
    assert result["good"]
    assert result["most"] == 0
    assert result["decisions"] == 3 * (len(TOKENS) - 1)
    assert result["cached"] == 3


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_of_the_next_token_are_wrong(
    model: Path, tmp_path: Path, answer: dict[str, Any], dtype: str
) -> None:
    answer["weights"] = np.roll(answer["weights"], 1, axis=0)
    assert not result_of(model, tmp_path, answer, dtype)["good"]


def test_weights_in_another_order_than_their_ids_are_wrong(
    model: Path, tmp_path: Path, answer: dict[str, Any]
) -> None:
    answer["weights"] = answer["weights"][..., ::-1].copy()
    assert not result_of(model, tmp_path, answer, "bfloat16")["good"]


def test_weights_that_are_no_numbers_are_wrong(
    model: Path, tmp_path: Path, answer: dict[str, Any]
) -> None:
    answer["weights"][5, 2, 1] = np.nan
    assert not result_of(model, tmp_path, answer, "float32")["good"]
