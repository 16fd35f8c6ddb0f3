# SPDX-License-Identifier: Apache-2.0
"""What `make demo` shows, and that it can fail."""

from __future__ import annotations

import re
from pathlib import Path

from tests.behaviour.conftest import run_example


def test_demo_finds_every_row_true_and_draws_it(tmp_path: Path) -> None:
    done = run_example("demo", tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    agree = re.search(r"([\d,]+) of ([\d,]+) rows agree", done.stdout)
    assert agree
    assert agree[1] == agree[2]
    assert int(agree[1].replace(",", "")) > 1000
    assert (tmp_path / "routes.png").read_bytes().startswith(b"\x89PNG")


def test_demo_notices_one_flipped_id(tmp_path: Path) -> None:
    done = run_example("demo", tmp_path, "--corrupt")
    assert done.returncode != 0
    assert "disagree" in done.stdout + done.stderr
