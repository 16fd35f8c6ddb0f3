# SPDX-License-Identifier: Apache-2.0
"""What `gpu.training` makes of the steps that a run left behind."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gpu.training import STEPS_FILE, __main__

SPENT = {"send": 1.0, "sample": 2.0, "log-probs": 0.5, "check": 0.0, "train": 1.5}


def step(arm: str, number: int, mean: float, **changed: Any) -> dict[str, Any]:
    of_all = {"tokens": 100, "greatest": 2 * mean, "k3": mean, "outside": 0.0, "differs": 0.25}
    rows = {"rows": 0, "wrong": 0, "first": "", "seconds": SPENT}
    return {"arm": arm, "step": number, "mean": mean, **of_all, **rows, **changed}


def draw(out: Path, *steps: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> int:
    (out / STEPS_FILE).write_text("".join(json.dumps(s) + "\n" for s in steps))
    monkeypatch.setattr("sys.argv", ["gpu.training", "--out", str(out), "--draw"])
    return __main__.main()


def cells(out: Path, way: str) -> list[list[str]]:
    lines = (out / "training.md").read_text().splitlines()
    found = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [line for line in found if line[0] == way]


def test_both_ways_are_compared_over_the_steps_that_both_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = [step("own", n, mean) for n, mean in enumerate((0.1, 0.3, 9.0))]
    replayed = [step("replay", n, 0.01) for n in range(2)]
    assert draw(tmp_path, *own, *replayed, monkeypatch=monkeypatch) == 0
    assert cells(tmp_path, "without replay")[0][1:4] == ["2", "200", "0.20000"]
    assert cells(tmp_path, "with replay")[0][1:4] == ["2", "200", "0.01000"]
    assert (tmp_path / "training.png").read_bytes().startswith(b"\x89PNG")


def test_time_of_a_step_is_of_the_steps_after_the_first_two(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = {"seconds": {**SPENT, "sample": 60.0}}
    steps = [
        step(arm, n, 0.1, **(slow if n < 2 else {}))
        for arm in ("own", "replay", "plain")
        for n in range(4)
    ]
    assert draw(tmp_path, *steps, monkeypatch=monkeypatch) == 0
    for way in ("with replay", "without rows"):
        assert cells(tmp_path, way)[1][1:] == ["2", "1.00", "2.00", "0.50", "1.50", "5.00"]


def test_interrupted_ways_stand_beside_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = [step(arm, 0, 0.1) for arm in ("own", "replay")]
    steps += [step("routed", 0, 0.4), step("forced", 0, 0.2)]
    assert draw(tmp_path, *steps, monkeypatch=monkeypatch) == 0
    assert cells(tmp_path, "interrupted, routed again")[0][3] == "0.40000"
    assert cells(tmp_path, "interrupted, forced experts")[0][3] == "0.20000"


def test_run_in_which_a_way_has_no_step_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert draw(tmp_path, step("own", 0, 0.1), monkeypatch=monkeypatch) == 1
