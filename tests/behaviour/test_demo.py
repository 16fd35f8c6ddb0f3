# SPDX-License-Identifier: Apache-2.0
"""What `make demo` shows, and that it can fail."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def run_demo(out: Path, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "examples.demo", "--out", str(out), *options],
        cwd=ROOT,
        text=True,
        capture_output=True,
        timeout=600,
        check=False,
    )


def test_demo_finds_every_row_true_and_draws_it(tmp_path: Path) -> None:
    done = run_demo(tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    agree = re.search(r"([\d,]+) of ([\d,]+) rows agree", done.stdout)
    assert agree
    assert agree[1] == agree[2]
    assert int(agree[1].replace(",", "")) > 1000
    assert (tmp_path / "routes.png").read_bytes().startswith(b"\x89PNG")


def test_demo_notices_one_flipped_id(tmp_path: Path) -> None:
    done = run_demo(tmp_path, "--corrupt")
    assert done.returncode != 0
    assert "disagree" in done.stdout + done.stderr
