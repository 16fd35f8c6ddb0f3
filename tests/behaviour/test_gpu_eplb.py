# SPDX-License-Identifier: Apache-2.0
"""The program for two GPUs, on a CPU: engines, EPLB threads, kill and verdict are real."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.behaviour.conftest import run_module


@pytest.mark.slow
def test_two_ranks_without_a_gpu(tmp_path: Path) -> None:
    load = ["--requests=8", "--rounds=2", "--max-tokens=24", "--step-interval=3", "--minutes=13"]
    done = run_module("gpu.eplb", tmp_path, "--device=cpu", "--eager", *load)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    found = json.loads((tmp_path / "result.json").read_text())
    assert all(found["verdict"].values())
    assert found["on"][0]["moved_experts"] > 0
