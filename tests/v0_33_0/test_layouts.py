# SPDX-License-Identifier: Apache-2.0
"""Tensor and pipeline parallel servers of this line return true rows to those who do not decline.

Prompts are those of `tests/behaviour/test_layouts.py`.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from examples.client import Completion
from tests.behaviour.test_layouts import MAX_TOKENS, PROMPTS, SILENT, assert_true, serving

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("layout", "caching"),
    [("tensor", True), ("pipeline", True), ("pipeline", False)],
    ids=["tensor", "pipeline", "pipeline-without-prefix-caching"],
)
def test_rows_of_two_workers_are_true(
    model: Path, tmp_path: Path, layout: str, caching: bool
) -> None:
    arguments = ["--enforce-eager", f"--{layout}-parallel-size=2"]
    arguments += [] if caching else ["--no-enable-prefix-caching"]
    with serving(model, tmp_path / "server.log", *arguments) as server:

        def complete(index: int) -> Completion:
            return server.generate(
                PROMPTS[index],
                max_tokens=MAX_TOKENS,
                ignore_eos=True,
                return_routed_experts=index != SILENT,
            )

        with ThreadPoolExecutor(len(PROMPTS)) as pool:
            # The second time from the prefix cache, if there is one.
            answers = [*pool.map(complete, [*range(len(PROMPTS))] * 2)]
    assert not any(len(answer.rows) for answer in answers[SILENT :: len(PROMPTS)])
    del answers[SILENT :: len(PROMPTS)]
    assert_true(model, answers)
