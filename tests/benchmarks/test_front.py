# SPDX-License-Identifier: Apache-2.0
"""The benchmark of the front end: its report, and that it runs."""

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.front.__main__ import Round, read_arguments, report_text, summarize

ROOT = Path(__file__).resolve().parents[2]


def round_of(silent: float, asking: float) -> Round:
    def measured(milliseconds: float) -> dict[str, float]:
        names = ("callback", "processor", "late", "answers_mb", "took")
        return dict.fromkeys(names, milliseconds)

    return {"generate": {"silent": measured(silent), "asking": measured(asking)}}


def test_rounds_are_compared_within_themselves() -> None:
    # Something slowed the second and the third: medians of each alone differ by 97.
    rounds = [round_of(1.0, 4.0), round_of(100.0, 103.0), round_of(3.0, 300.0), round_of(2.0, 5.0)]
    assert summarize(rounds)["generate"]["callback"] == (2.5, 54.0, 3.0)


@pytest.mark.parametrize(("more", "verdict"), [(5.0, "met"), (5.1, "missed")])
def test_target_is_for_the_longest_callback(more: float, verdict: str) -> None:
    rounds = [round_of(1.0, 1.0 + more) for _ in range(8)]
    for found in rounds:
        found["generate"]["asking"]["late"] = 100.0
    text = report_text(rounds, read_arguments([]))
    assert f"| 1.0, {1 + more:.1f}, **+{more:.1f}** | 1.0, 100.0, **+99.0** | {verdict} |" in text


def test_it_runs(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "benchmarks.front", "--out", str(tmp_path / "front.md")]
    words += ["--rounds=1", "--layers=2", "--prompt=30000", "--steps=4", "--readers=2"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stdout + done.stderr
    text = (tmp_path / "front.md").read_text()
    assert "| 2 stalled readers | " in text
    assert "Too few rounds" in text
