# SPDX-License-Identifier: Apache-2.0
"""The engines that the soak on several GPUs would start."""

from __future__ import annotations

import json
import os
import subprocess
import sys
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


def test_report_compares_turns_of_the_same_requests(tmp_path: Path) -> None:
    turns = {"silent_s": 1.0, "all_s": 1.02, "silent_step_ms": 20.0, "all_step_ms": 20.2}
    (tmp_path / "summary-0.json").write_text(
        json.dumps({"turns": {name: [time] * 8 for name, time in turns.items()}})
    )
    record: dict[str, Any] = {}
    soak.collect(record, tmp_path, 1)
    assert record["ranks"][0]["summary"]["asking_costs"] == {
        "turns": "+2.00 % [+2.00, +2.00]",
        "steps": "+1.00 % [+1.00, +1.00]",
    }


LATE_STEP = """
import subprocess, sys, threading, time
from pathlib import Path
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from gpu.soak import stacks

@triton.jit
def one(out):
    tl.store(out, 1.0)

def late_step():
    while "in late_step" not in file.read_text():
        time.sleep(0.01)

file = Path(sys.argv[1])
stacks.register(file)
# Its LLVM installs handlers of many signals.
triton.compile(ASTSource(one, {"out": "*fp32"}), target=GPUTarget("cuda", 90, 32))
compiler = subprocess.Popen(["sleep", "60"])
stop, start = threading.Event(), time.monotonic()
thread = threading.Thread(target=stacks.watch, args=(lambda: start, stop, file))
thread.start()
late_step()
stop.set()
thread.join()
print("alive" if compiler.poll() is None else "ended")
compiler.kill()
"""


def test_stacks_of_a_late_step_are_kept_once_and_its_child_gets_no_signal(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    (tmp_path / "late_step.py").write_text(LATE_STEP)
    command = [sys.executable, str(tmp_path / "late_step.py"), str(tmp_path / "stacks.txt")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    environment["TRITON_CACHE_DIR"] = str(tmp_path / "triton")
    output = subprocess.check_output(command, env=environment, text=True)
    # The child has no handler of the signal, which would end it.
    assert output.strip() == "alive"
    text = (tmp_path / "stacks.txt").read_text()
    assert text.count(" step took ") == 1
    assert "in late_step" in text
