# SPDX-License-Identifier: Apache-2.0
"""What stands in for parts of vLLM that a scheduler without a model does not need."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheManager


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


def kv_cache_manager(num_blocks: int, max_model_len: int) -> KVCacheManager:
    """One of full attention, without a prefix cache."""
    import torch
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

    spec = FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=1, dtype=torch.float32)
    config = KVCacheConfig(num_blocks, [], [KVCacheGroupSpec(["layer"], spec)])
    return KVCacheManager(config, max_model_len, hash_block_size=16, enable_caching=False)
