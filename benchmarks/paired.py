# SPDX-License-Identifier: Apache-2.0
"""Ratios of paired timings, with an interval that slow rounds do not blow up."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Estimate:
    """A difference in percent, with its interval.

    Attributes:
        percent: the Hodges-Lehmann estimate: by how many percent the ratio is above 1.
        low: lower end of the 95 % interval, in percent; None with fewer than six pairs.
        high: upper end.
        pairs: number of pairs.
    """

    percent: float
    low: float | None
    high: float | None
    pairs: int


def critical_rank(pairs: int, level: float = 0.95) -> int | None:
    """The largest w with P(W <= w) <= (1 - level) / 2, for W the signed-rank statistic of Wilcoxon
    for `pairs` pairs, from its exact distribution. None: there is none, the pairs are too few.
    """
    distribution = np.ones(1)
    for rank in range(1, pairs + 1):
        wider = np.zeros(len(distribution) + rank)
        wider[: len(distribution)] += distribution / 2
        wider[rank:] += distribution / 2
        distribution = wider
    below = int(np.searchsorted(np.cumsum(distribution), (1 - level) / 2, side="right"))
    return below - 1 if below else None


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
    logs = np.array([math.log(t / r) for t, r in zip(times, references, strict=True)])
    first, second = np.triu_indices(len(logs))
    means = np.sort((logs[first] + logs[second]) / 2)
    rank = critical_rank(len(logs))

    def percent(value: float) -> float:
        return 100 * math.expm1(value)

    return Estimate(
        percent(float(np.median(means))),
        None if rank is None else percent(float(means[rank])),
        None if rank is None else percent(float(means[-1 - rank])),
        len(logs),
    )
