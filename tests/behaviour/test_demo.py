# SPDX-License-Identifier: Apache-2.0
"""What `make demo` and `make replay` show, and that the demo can fail."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
import torch

from tests.behaviour.conftest import pretend_amx, run_module

HAS_AMX = torch.cpu._is_amx_tile_supported()


def count_agreeing(done: subprocess.CompletedProcess[str]) -> tuple[int, int]:
    """Rows that agree, and all rows."""
    agree = re.search(r"([\d,]+) of ([\d,]+) rows agree", done.stdout)
    assert agree, done.stdout + done.stderr
    agreeing, rows = (int(count.replace(",", "")) for count in agree.groups())
    assert rows > 1000
    return agreeing, rows


def test_demo_finds_every_row_true_and_draws_it(tmp_path: Path) -> None:
    done = run_module("demos.rows", tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    agreeing, rows = count_agreeing(done)
    assert agreeing == rows
    assert (tmp_path / "routes.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_demo_notices_one_flipped_id_and_all_others_are_true_with_the_other_kernel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CPUs with and without AMX use different MoE kernels. A plugin makes every
    process of the server believe that the CPU is of the other kind."""
    out = tmp_path / "out"
    pretend_amx(tmp_path, not HAS_AMX)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    done = run_module("demos.rows", out, "--corrupt")
    assert done.returncode != 0
    assert f"The CPU has AMX: {not HAS_AMX}" in (out / "server.log").read_text()
    agreeing, rows = count_agreeing(done)
    assert agreeing == rows - 1
    assert "disagree" in done.stdout + done.stderr


@pytest.mark.slow
def test_replay_passes_and_draws(tmp_path: Path) -> None:
    done = run_module("demos.replay", tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "6,144 sampled tokens" in done.stdout
    assert (tmp_path / "mismatch.png").read_bytes().startswith(b"\x89PNG")
    assert "times nearer" in (tmp_path / "record.md").read_text()
