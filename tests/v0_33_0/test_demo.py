# SPDX-License-Identifier: Apache-2.0
"""What `make demo ON=v0.33.0` shows, on the CPU wheel for tests."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from harness.lines import installed
from harness.server import Server
from tests.behaviour.conftest import run_module
from tests.real import PROJECT
from tools.common.pin import Project

PRISTINE = Project(PROJECT.root, installed()).build / "pristine" / "site"


def test_vllm_runs_its_triton_kernels_in_the_interpreter(tmp_path: Path) -> None:
    env = Server("model", tmp_path / "log").env
    program = "from vllm.triton_utils import HAS_TRITON, triton; print(HAS_TRITON, triton.__name__)"
    done = subprocess.run(
        [sys.executable, "-c", program], env=env, text=True, capture_output=True, check=False
    )
    assert done.stdout.splitlines()[-1:] == ["True triton"], done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.skipif(not PRISTINE.is_dir(), reason="no pristine build: make demo-pristine")
def test_demo_of_the_release_finds_only_zero_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(PRISTINE))
    done = run_module("demos.rows", tmp_path, "--pristine")
    assert done.returncode == 1
    assert "this vLLM returns only zero rows" in done.stdout
