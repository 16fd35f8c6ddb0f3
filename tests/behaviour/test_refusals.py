# SPDX-License-Identifier: Apache-2.0
"""Settings that cannot return true rows are refused by name when the engine starts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import transformers

from tests.behaviour.conftest import running


def test_pipeline_parallelism_with_external_launcher_is_refused(
    checkpoint: Callable[..., Path],
) -> None:
    with (
        pytest.raises(ValueError, match="pipeline-parallel-size 1"),
        running(
            checkpoint(),
            pipeline_parallel_size=2,
            distributed_executor_backend="external_launcher",
        ),
    ):
        pass


def test_model_without_experts_is_refused(tmp_path: Path) -> None:
    config = transformers.LlamaConfig(
        vocab_size=768,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path)
    with (
        pytest.raises(ValueError, match="found no FusedMoE layer in LlamaForCausalLM"),
        running(tmp_path, skip_tokenizer_init=True),
    ):
        pass
