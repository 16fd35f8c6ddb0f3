# SPDX-License-Identifier: Apache-2.0
"""What each line's server gets, and how its answers are read. No vLLM runs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness.lines import LINES
from harness.server import Server, ServerError, read_answer
from tests.clients.driving import encode
from tests.real import PROJECTS


def reply(**fields: Any) -> dict[str, Any]:
    """Three rows of two layers x two ids, of two prompt tokens and two returned ones."""
    rows = encode(np.arange(12, dtype=np.uint8).reshape(3, 2, 2))
    return {"choices": [{"index": 0, "token_ids": [7, 8], "routed_experts": rows, **fields}]}


def test_every_line_of_the_patches_is_described() -> None:
    assert set(LINES) == {project.line for project in PROJECTS}


def test_packages_of_the_line_stand_before_those_of_the_caller(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PYTHONPATH", "/pristine/site")
    line = next(line for line in LINES.values() if line.packages)
    server = Server("model", tmp_path / "log", line=line.name)
    packages, *_, rest = server.env["PYTHONPATH"].split(os.pathsep)
    assert Path(packages) == line.packages[0]
    assert rest == "/pristine/site"


def test_answer_that_should_state_its_place_and_does_not_is_refused() -> None:
    with pytest.raises(ServerError, match="routed_experts_start"):
        read_answer([5, 6], reply())
