# SPDX-License-Identifier: Apache-2.0
"""The record of a rollout of several turns."""

from __future__ import annotations

import pytest

from benchmarks import turns
from benchmarks.turns import MODES, TURNS, Turn, report

Rounds = list[dict[str, list[Turn]]]


def make_rounds(count: int) -> Rounds:
    """Answers of 1, 5 and 2 kB a turn, in 10, 30 and 20 ms; a slow round is slow for all."""
    sizes, seconds = dict(zip(MODES, (1, 5, 2), strict=True)), (0.01, 0.03, 0.02)
    times = dict(zip(MODES, seconds, strict=True))
    return [
        {
            mode: [Turn(1000 * sizes[mode], times[mode] * (1 + n), None, ())] * TURNS
            for mode in MODES
        }
        for n in range(count)
    ]


@pytest.fixture(autouse=True)
def command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "command", lambda: ["-m", "benchmarks.turns"])


def test_times_are_compared_within_a_round() -> None:
    doubled = "+100.00 % [+100.00, +100.00]"
    tripled = "+200.00 % [+200.00, +200.00]"
    assert report(make_rounds(8)).count(f"| {tripled} | {doubled} |") == TURNS


def test_few_rounds_give_no_interval() -> None:
    assert report(make_rounds(7)).count("| too few rounds | too few rounds |") == TURNS
