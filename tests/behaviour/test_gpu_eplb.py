# SPDX-License-Identifier: Apache-2.0
"""The program for two GPUs, on a CPU: engines, EPLB threads, kill and verdict are real."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_two_ranks_without_a_gpu(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "gpu.eplb", "--device", "cpu"]
    command += ["--eager", "--requests", "8", "--rounds", "2", "--max-tokens", "24"]
    command += ["--step-interval", "3", "--minutes", "5", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    found = json.loads((tmp_path / "result.json").read_text())
    assert all(found["verdict"].values())
    assert found["on"][0]["moved_experts"] > 0
