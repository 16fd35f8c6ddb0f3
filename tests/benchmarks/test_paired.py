# SPDX-License-Identifier: Apache-2.0
"""Paired ratios: the estimate and its interval."""

from itertools import product

import numpy as np
import pytest

from harness.paired import Estimate, compare, critical_rank


# Tables of the signed-rank test, two-sided, 5 %.
@pytest.mark.parametrize(
    ("pairs", "rank"), [(6, 0), (7, 2), (8, 3), (10, 8), (15, 25), (20, 52), (25, 89)]
)
def test_critical_rank_is_the_printed_one(pairs: int, rank: int | None) -> None:
    assert critical_rank(pairs) == rank


def p_value(logs: np.ndarray, shift: float) -> float:
    """Of the signed-rank test that the differences are symmetric about the shift: by trying all
    signs."""
    ranks = np.argsort(np.argsort(np.abs(logs - shift))) + 1
    seen = ranks[logs > shift].sum()
    sums = [ranks[list(signs)].sum() for signs in product([False, True], repeat=len(logs))]
    below, above = np.mean([s <= seen for s in sums]), np.mean([s >= seen for s in sums])
    return float(min(1.0, 2 * min(below, above)))


def test_interval_holds_just_the_shifts_that_the_test_does_not_reject() -> None:
    rng = np.random.default_rng(1)
    logs = rng.normal(0.01, 0.02, 9)
    estimate = compare(np.exp(logs).tolist(), [1.0] * 9)
    assert estimate.low is not None
    assert estimate.high is not None
    low, high = np.log1p(estimate.low / 100), np.log1p(estimate.high / 100)
    assert p_value(logs, low + 1e-9) > 0.05 >= p_value(logs, low - 1e-9)
    assert p_value(logs, high - 1e-9) > 0.05 >= p_value(logs, high + 1e-9)


def test_fewer_than_eight_pairs_give_no_number() -> None:
    estimate = compare([1.01] * 7, [1.0] * 7)
    assert estimate == Estimate(7, None, None, None)
    assert str(estimate) == "too few rounds"


def test_eight_pairs_give_an_estimate_and_an_interval() -> None:
    assert str(compare([1.01] * 8, [1.0] * 8)) == "+1.00 % [+1.00, +1.00]"


@pytest.mark.parametrize(("times", "references"), [([], []), ([1.0, 2.0], [1.0])])
def test_what_is_not_paired_is_refused(times: list[float], references: list[float]) -> None:
    with pytest.raises(ValueError, match=r"pairs|shorter"):
        compare(times, references)
