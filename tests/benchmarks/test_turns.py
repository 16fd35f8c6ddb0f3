# SPDX-License-Identifier: Apache-2.0
"""The record of a rollout of several turns."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import turns
from benchmarks.turns import MODES, TURNS, Turn, report
from harness.lines import installed
from harness.server import ServerError

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


def test_bytes_are_added_over_the_turns() -> None:
    text = report(make_rounds(8))
    assert f"{5 * TURNS} kB with all rows each time, {2 * TURNS} kB with new rows alone" in text


def test_times_are_compared_within_a_round() -> None:
    tripled, doubled = "+200.00 % [+200.00, +200.00]", "+100.00 % [+100.00, +100.00]"
    assert report(make_rounds(8)).count(f"| {tripled} | {doubled} |") == TURNS


def test_few_rounds_give_no_interval() -> None:
    assert report(make_rounds(7)).count("| too few rounds | too few rounds |") == TURNS


def test_server_is_of_the_line_and_its_end_is_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def server(*args: object, line: str) -> None:
        raise ServerError(f"no server of {line}")

    monkeypatch.setattr(turns, "Server", server)
    assert turns.main(["--on", installed(), f"--out={tmp_path / 'record.md'}"]) == 1
    assert capsys.readouterr().err == f"error: no server of {installed()}\n"
