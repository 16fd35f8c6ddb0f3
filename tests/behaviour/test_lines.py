# SPDX-License-Identifier: Apache-2.0
"""What each line's server gets, and how its answers are read. No vLLM runs."""

from __future__ import annotations

import base64
import io
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness.lines import FIRST, LINES
from harness.server import ARGUMENTS, Server, ServerError, read_answer
from tests.real import PROJECT, PROJECTS

SECOND = "v0.33.0"


def reply(**fields: Any) -> dict[str, Any]:
    """Three rows of two layers x two ids, of two prompt tokens and two returned ones."""
    buffer = io.BytesIO()
    np.save(buffer, np.arange(12, dtype=np.uint8).reshape(3, 2, 2))
    rows = base64.b64encode(buffer.getvalue()).decode()
    return {"choices": [{"token_ids": [7, 8], "routed_experts": rows, **fields}]}


def test_every_line_of_the_patches_is_described() -> None:
    assert set(LINES) == {project.line for project in PROJECTS}
    assert PROJECT.line == FIRST


def test_first_line_adds_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("PYTHONPATH", raising=False)
    server = Server("model", tmp_path / "log", ["--seed=1"])
    assert server.command[5 : 5 + len(ARGUMENTS) + 1] == [*ARGUMENTS, "--seed=1"]
    assert server.env["TORCH_COMPILE_DISABLE"] == "1"
    assert "PYTHONPATH" not in server.env


def test_arguments_and_variables_of_the_caller_override_the_lines(tmp_path: Path) -> None:
    server = Server(
        "model", tmp_path / "log", ["--enforce-eager"], {"TRITON_INTERPRET": "0"}, line=SECOND
    )
    assert "--no-enforce-eager" in server.command
    later = server.command.index("--no-enforce-eager")
    assert "--enforce-eager" in server.command[later:]
    assert server.env["TORCH_COMPILE_DISABLE"] == "0"
    assert server.env["TRITON_INTERPRET"] == "0"


def test_packages_of_the_line_stand_before_those_of_the_caller(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PYTHONPATH", "/pristine/site")
    server = Server("model", tmp_path / "log", line=SECOND)
    packages, rest = server.env["PYTHONPATH"].split(os.pathsep)
    assert (Path(packages) / "triton_interpreted").is_dir()
    assert rest == "/pristine/site"


def test_answer_without_its_place_begins_at_0_and_states_no_layers() -> None:
    answer = read_answer([5, 6], reply(), states_place=False)
    assert (answer.start, answer.moe_layers) == (0, None)
    assert answer.rows is not None
    assert answer.rows.shape == (3, 2, 2)


def test_answer_that_should_state_its_place_and_does_not_is_refused() -> None:
    with pytest.raises(ServerError, match="routed_experts_start"):
        read_answer([5, 6], reply())


def test_answer_states_its_place() -> None:
    answer = read_answer([4, 5, 6], reply(routed_experts_start=1, moe_layers=[1]))
    assert (answer.start, answer.moe_layers) == (1, (1,))


def test_rows_that_begin_elsewhere_are_refused() -> None:
    with pytest.raises(ServerError, match="the answer has 3 rows"):
        read_answer([4, 5, 6], reply(), states_place=False)


@pytest.mark.parametrize("line", LINES)
def test_server_waits_as_long_as_its_line_wants_or_its_caller(line: str, tmp_path: Path) -> None:
    assert Server("model", tmp_path / "log", line=line).timeout_s == LINES[line].ready_s
    assert Server("model", tmp_path / "log", line=line, timeout_s=5).timeout_s == 5
