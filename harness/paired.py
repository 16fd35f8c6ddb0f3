# SPDX-License-Identifier: Apache-2.0
"""Ratios of paired timings, with an interval that slow rounds do not blow up."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

# Fewer say nothing: no percentage, no interval and no verdict is given for them.
ENOUGH_PAIRS = 8


@dataclass(frozen=True)
class Estimate:
    """A difference in percent: the Hodges-Lehmann estimate, and its 95 % interval. With fewer than
    `ENOUGH_PAIRS` pairs, there is none."""

    pairs: int
    percent: float | None = None
    low: float | None = None
    high: float | None = None

    def __str__(self) -> str:
        """As tables have it: +0.12 % [+0.05, +0.19]."""
        if self.percent is None:
            return "too few rounds"
        return f"{self.percent:+.2f} % [{self.low:+.2f}, {self.high:+.2f}]"


def critical_rank(pairs: int, level: float = 0.95) -> int:
    """The largest w with P(W <= w) <= (1 - level) / 2, for W the signed-rank statistic of Wilcoxon
    for six `pairs` or more, from its exact distribution.
    """
    distribution = np.ones(1)
    for rank in range(1, pairs + 1):
        wider = np.zeros(len(distribution) + rank)
        wider[: len(distribution)] += distribution / 2
        wider[rank:] += distribution / 2
        distribution = wider
    below = int(np.searchsorted(np.cumsum(distribution), (1 - level) / 2, side="right"))
    return below - 1


def compare(times: Sequence[float], references: Sequence[float]) -> Estimate:
    """By how many percent `times` are longer than the `references` they are paired with.

    The Hodges-Lehmann estimate of the logarithm of the ratio and the 95 % interval that belongs to
    Wilcoxon's signed-rank test, exact: distribution-free for pairs whose ratio scatters alike to
    both sides, which exchangeable noise does, and little moved by a few rounds that something
    slowed.

    Raises:
        ValueError: no pairs, or sequences of unequal lengths.
    """
    if not times:
        raise ValueError("no pairs to compare")
    if len(times) < ENOUGH_PAIRS and len(times) == len(references):
        return Estimate(len(times))
    logs = np.array([math.log(t / r) for t, r in zip(times, references, strict=True)])
    first, second = np.triu_indices(len(logs))
    means = np.sort((logs[first] + logs[second]) / 2)
    rank = critical_rank(len(logs))

    def percent(value: np.float64) -> float:
        return 100 * math.expm1(value)

    return Estimate(
        len(logs), percent(np.median(means)), percent(means[rank]), percent(means[-1 - rank])
    )
