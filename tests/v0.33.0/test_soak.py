# SPDX-License-Identifier: Apache-2.0
"""`make soak ON=v0.33.0`: the first line's soak, on this line's engine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.behaviour.test_endpoints import run_program

SOAK = """
import sys
from pathlib import Path
from tests.behaviour.test_soak import soak
soak(Path(sys.argv[1]), sys.argv[2])
"""


@pytest.mark.slow
def test_soak(checkpoint: Callable[..., Path], line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a process of its own, because Triton's interpreter must be chosen before vLLM is
    imported."""
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    run_program(line, "-c", SOAK, str(checkpoint()), line)
