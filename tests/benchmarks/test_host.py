# SPDX-License-Identifier: Apache-2.0
"""The benchmark of the host."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks.host import BLOCK
from benchmarks.host.__main__ import average, more_rows

ROOT = Path(__file__).resolve().parents[2]


def test_steps_of_a_block_have_medians_of_their_own() -> None:
    """In one step of each block all requests fill it. One slow repetition does not count."""
    steps = np.ones((3 * BLOCK, 2))
    steps[5::BLOCK] = 17
    steps[7] = 1000
    assert average(steps).tolist() == [2, 2]


def test_rows_compare_with_the_flag_off_of_the_same_build() -> None:
    times = {
        ("release", "flag off"): [[1.0, 2.0]],
        ("series", "flag off"): [[2.0, 3.0]],
        ("series", "all ask"): [[2.5, 3.0]],
    }
    assert more_rows(times, lambda values: np.median(values, axis=0)) == [
        ["release, flag off", "1.00", "2.00", "3.00"],
        ["series, flag off", "2.00", "3.00", "5.00"],
        ["series, all ask", "+0.50", "+0.00", "+0.50"],
    ]


@pytest.mark.slow
def test_it_runs(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "benchmarks.host", "--out", str(tmp_path / "host.md")]
    words += ["--requests=8", "--blocks=1", "--groups=4", "--rounds=1", "--layers=2"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "host.md").read_text().count("| series, all ask |") == 4
