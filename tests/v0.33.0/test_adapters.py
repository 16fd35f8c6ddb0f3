# SPDX-License-Identifier: Apache-2.0
"""An adapter of the router is applied: rows are the adapted router's."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.engine_v0_33_0 import OPTIONS
from tests.behaviour.conftest import BLOCK, ask, assert_rows, environment, random_prompt, running
from tests.behaviour.test_features import make_adapter

__all__ = ["environment"]

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("name", ["gate", "q_proj"])
def test_rows_of_an_adapter_are_those_of_merged_weights(
    model: Path, tmp_path: Path, name: str
) -> None:
    from vllm.lora.request import LoRARequest

    merged = make_adapter(model, tmp_path / "1", [name], seed=1)
    adapter = LoRARequest("1", 1, str(tmp_path / "1" / "adapter"))
    prompt = random_prompt(230, 3 * BLOCK + 4)
    options = {"enable_lora": True, "max_lora_rank": 8, "lora_target_modules": [name]}
    with running(model, **OPTIONS, **options) as llm:
        (output,) = ask(llm, prompt, lora=adapter)
    (completion,) = output.outputs
    assert_rows(merged, [*prompt, *completion.token_ids], completion.routed_experts)
