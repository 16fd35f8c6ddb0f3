# SPDX-License-Identifier: Apache-2.0
"""The engines that the soak on several GPUs would start."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest

from gpu.soak import __main__ as soak


@pytest.mark.parametrize(
    ("gpus", "tp", "name"),
    [(1, 1, "one"), (2, 1, "DP2+EP2"), (4, 1, "DP4+EP4"), (4, 2, "TP2xDP2+EP4")],
)
def test_layout_is_named(gpus: int, tp: int, name: str) -> None:
    assert soak.layout(gpus, tp) == name


def test_engines_share_the_gpus_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[tuple[dict[str, Any], dict[str, str]]] = []

    def ended(command: list[str], log: Path, env: dict[str, str]) -> MagicMock:
        """An engine that has ended."""
        started.append((json.loads(Path(command[-1]).read_text()), env))
        engine = MagicMock()
        engine.__enter__.return_value = engine
        engine.poll.return_value = 1
        engine.first_error.return_value = engine.tail.return_value = "ended by the test"
        return engine

    monkeypatch.setattr("harness.hosts.Kept", ended)
    argv = ["soak", "run", "--build-label", "x", "--gpus", "4", "--tp", "2"]
    monkeypatch.setattr("sys.argv", [*argv, "--out", str(tmp_path)])
    assert soak.main() == 1
    assert [spec["devices"] for spec, _ in started] == [[0, 1], [2, 3]]
    for rank, (spec, environment) in enumerate(started):
        assert (spec["rank"], spec["ranks"]) == (rank, 2)
        assert (environment["VLLM_DP_RANK"], environment["VLLM_DP_SIZE"]) == (str(rank), "2")
        assert spec["options"]["tensor_parallel_size"] == 2


def test_gpus_that_cannot_be_shared_out_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["soak", "run", "--build-label", "x", "--gpus", "4", "--tp", "3"]
    monkeypatch.setattr("sys.argv", [*argv, "--out", str(tmp_path)])
    with pytest.raises(SystemExit):
        soak.main()
    assert "4 GPUs are not engines of 3 each" in capsys.readouterr().err
