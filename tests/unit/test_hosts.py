# SPDX-License-Identifier: Apache-2.0
"""The ranks of a group start, meet and end; no engine."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from harness import hosts

PROGRAM = """
import os
from pathlib import Path
from harness import hosts

def rank(spec):
    print("RuntimeError: not today" if spec["fails"] else "here", flush=True)
    if spec["fails"]:
        raise RuntimeError("not today")
    (Path(spec["folder"]) / f"port-{spec['rank']}").write_text(os.environ["VLLM_DP_MASTER_PORT"])
    hosts.meet(Path(spec["folder"]), "done", spec["rank"], 2)

hosts.run(rank)
"""


def run_group(folder: Path, monkeypatch: pytest.MonkeyPatch, fails: int | None = None) -> str:
    (folder / "program.py").write_text(PROGRAM)
    monkeypatch.setenv("PYTHONPATH", str(folder))
    specs = [{"folder": folder, "rank": rank, "fails": rank == fails} for rank in range(2)]
    with hosts.ranks("program", specs, folder, hosts.environment(), 29000) as engines:
        return hosts.wait(engines, folder, 600.0)


def test_ranks_of_a_group_meet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run_group(tmp_path, monkeypatch) == ""
    assert [(tmp_path / f"port-{rank}").read_text() for rank in range(2)] == ["29000"] * 2


def test_rank_that_fails_ends_the_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run_group(tmp_path, monkeypatch, fails=1) == "an engine ended: RuntimeError: not today"


def rank(ended: bool = False, error: str = "") -> Any:
    return Mock(
        poll=lambda: 1 if ended else None,
        first_error=lambda: error,
        last_line=lambda: "the last line",
    )


def wait(folder: Path, *ranks: Any, limit_s: float = 600.0) -> str:
    return hosts.wait(ranks, folder, limit_s, every_s=0.01)


def test_ranks_that_have_met_may_end(tmp_path: Path) -> None:
    with ThreadPoolExecutor(2) as pool:
        for number in range(2):
            pool.submit(hosts.meet, tmp_path, "done", number, 2)
        assert wait(tmp_path, rank(), rank()) == ""
    assert wait(tmp_path, rank(ended=True), rank()) == ""


def test_rank_that_ends_before_is_told_with_its_error(tmp_path: Path) -> None:
    (tmp_path / "done-0").touch()
    why = wait(tmp_path, rank(ended=True), rank(ended=True, error="ValueError: no"))
    assert why == "an engine ended: ValueError: no"


def test_time_that_is_up_is_told(tmp_path: Path) -> None:
    assert wait(tmp_path, rank(), limit_s=0.0) == "not finished after 0 s: the last line"
