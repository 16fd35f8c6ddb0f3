# SPDX-License-Identifier: Apache-2.0
"""What stands in for parts of vLLM that a scheduler without a model does not need."""

from __future__ import annotations

from types import SimpleNamespace


def model_config(max_model_len: int) -> SimpleNamespace:
    """What the scheduler of v0.33.0 reads of a `ModelConfig`, for a model of text alone."""
    return SimpleNamespace(
        is_deepseek_mla=False,
        is_diffusion=False,
        is_encoder_decoder=False,
        max_model_len=max_model_len,
        multimodal_config=None,
        return_sampling_mask=False,
        runner_type="generate",
        skip_tokenizer_init=True,
        supports_multimodal_inputs=False,
        uses_mrope=False,
    )
