# SPDX-License-Identifier: Apache-2.0
"""What the demo of a training run calls a failure."""

from __future__ import annotations

import re
from typing import Any

import pytest

from demos.train import ARMS, report
from demos.train.report import Step


def make_steps(**changes: Any) -> list[Step]:
    """Two steps of both ways, in which replay is nearer; the last one has the changes."""
    steps = [
        Step(arm, number, 2304, mean, 10 * mean, 1e-4, 0.0, 0.04, 6864, 0, "", {"send": 1.0})
        for arm, mean in zip(ARMS, (0.015, 0.004), strict=True)
        for number in range(2)
    ]
    return [*steps[:-1], Step(**{**vars(steps[-1]), **changes})]


def test_right_rows_and_nearer_log_probs_are_no_failure() -> None:
    assert report.faults(make_steps(), 2) == []
    assert "27,456 rows" in report.verdict(make_steps())
    assert "from 0.0150 to 0.0040" in report.verdict(make_steps())


@pytest.mark.parametrize(
    ("steps", "told"),
    [
        (
            make_steps(wrong=3, first="the row at position 7"),
            "3 of 6,864 .* step 2 with replay: the",
        ),
        (make_steps(mean=0.05), "with replay is 0.0270, without it 0.0150"),
        (make_steps(mean=float("nan")), "with replay is nan"),
        (make_steps()[:3], "3 of 4 steps were measured"),
        ([], "0 of 4 steps were measured"),
    ],
)
def test_run_that_shows_nothing_fails(steps: list[Step], told: str) -> None:
    (found,) = report.faults(steps, 2)
    assert re.search(told, found)


def test_table_has_both_ways_of_a_step_together() -> None:
    ways = [(row[0], row[1]) for row in report.rows(make_steps())]
    assert ways == [(step, name) for step in ("1", "2") for name in ARMS.values()]
    assert "| 2 | with replay | 0.0040 | 0.040 |" in report.record(make_steps())
