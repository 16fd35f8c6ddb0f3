# SPDX-License-Identifier: Apache-2.0
"""The scheduler of either line, without a model. What a model would say is made up."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest import mock

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine import EngineCoreRequest
    from vllm.v1.kv_cache_interface import KVCacheConfig


def make_config(
    *,
    num_blocks: int,
    block_size: int,
    max_model_len: int,
    max_num_seqs: int,
    batch: int,
    caching: bool = True,
    asynchronous: bool = False,
    flag: bool = True,
) -> VllmConfig:
    """The configuration of a scheduler for a model of text alone. `batch` are the most tokens in a
    step, `flag` is `enable_return_routed_experts`."""
    from vllm.config import DeviceConfig, VllmConfig

    config = VllmConfig(device_config=DeviceConfig("cpu"))
    model: Any = SimpleNamespace(
        enable_return_routed_experts=flag,
        is_deepseek_mla=False,
        is_diffusion=False,
        is_encoder_decoder=False,
        is_multimodal_model=False,
        max_model_len=max_model_len,
        multimodal_config=None,
        return_sampling_mask=False,
        runner_type="generate",
        skip_tokenizer_init=True,
        supports_multimodal_inputs=False,
        uses_mrope=False,
    )
    config.model_config = model
    # v0.33.0 keeps the flag here.
    getattr(config, "aux_output_config", model).enable_return_routed_experts = flag
    config.cache_config.num_gpu_blocks = num_blocks
    config.cache_config.block_size = block_size
    config.cache_config.enable_prefix_caching = caching
    scheduler = config.scheduler_config
    scheduler.max_num_seqs = max_num_seqs
    scheduler.max_num_batched_tokens = batch
    scheduler.max_num_scheduled_tokens = batch
    scheduler.scheduler_reserve_full_isl = False
    scheduler.async_scheduling = asynchronous
    return config


def full_attention(num_blocks: int, block_size: int) -> KVCacheConfig:
    """The KV cache of one group of layers."""
    import torch
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

    shape: dict[str, Any] = {"num_kv_heads": 1, "head_size": 1, "dtype": torch.float32}
    spec = FullAttentionSpec(block_size=block_size, **shape)
    return KVCacheConfig(num_blocks, [], [KVCacheGroupSpec(["full"], spec)])


def make_scheduler(config: VllmConfig, kv_cache: KVCacheConfig, drafts: int = 0) -> Scheduler:
    """A scheduler, asynchronous as `config` says, for that many draft tokens of each request."""
    from vllm.v1.core.kv_cache_utils import resolve_kv_cache_block_sizes
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.structured_output import StructuredOutputManager

    scheduler_block, hash_block = resolve_kv_cache_block_sizes(kv_cache, config)
    kind = AsyncScheduler if config.scheduler_config.async_scheduling else Scheduler
    scheduler: Any = kind(
        vllm_config=config,
        kv_cache_config=kv_cache,
        structured_output_manager=StructuredOutputManager(config),
        block_size=scheduler_block,
        hash_block_size=hash_block,
        log_stats=False,
    )
    # The runner that returns rows: v0.20.2 has another.
    scheduler.use_v2_model_runner = hasattr(config, "aux_output_config")
    scheduler.num_lookahead_tokens = scheduler.num_spec_tokens = drafts
    if isinstance(scheduler, AsyncScheduler):
        scheduler._spec_token_placeholders = [-1] * drafts
    return scheduler


def make_request(req_id: str, prompt: Sequence[int], sampling: Any) -> EngineCoreRequest:
    """A request of the front end to the engine. `sampling` are its `SamplingParams`."""
    from vllm.v1.engine import EngineCoreRequest

    return EngineCoreRequest(
        request_id=req_id,
        external_req_id=req_id,
        prompt_token_ids=list(prompt),
        mm_features=None,
        sampling_params=sampling,
        pooling_params=None,
        arrival_time=0.0,
        lora_request=None,
        cache_salt=None,
        data_parallel_rank=None,
    )


def make_worker_connector(
    config: VllmConfig,
    kv_cache: KVCacheConfig,
    shape: tuple[int, int],
    dtype: str,
    snapshot: Callable[..., Any],
    depth: int = 1,
) -> Any:
    """The worker's side of v0.33.0's connector, with rows of `shape` (layers, top-k). `snapshot`
    returns the rows of a step; `depth` are the most steps at once."""
    from vllm.distributed import parallel_state
    from vllm.distributed.aux_output_connector import worker

    capturer = SimpleNamespace(
        shape_per_token=shape, output_dtype_name=dtype, snapshot_routing_data=snapshot
    )
    needed: Any = SimpleNamespace(
        scheduler_config=config.scheduler_config,
        cache_config=config.cache_config,
        parallel_config=config.parallel_config,
        kv_transfer_config=None,
        aux_output_config=config.aux_output_config,
        max_concurrent_batches=depth,
    )
    with (
        mock.patch.multiple(
            worker,
            RoutedExpertsCapturer=lambda **_: capturer,
            bind_routed_experts_capturer=lambda *_: None,
            get_tp_group=lambda: SimpleNamespace(is_first_rank=True),
        ),
        mock.patch.object(parallel_state, "_PP", SimpleNamespace(is_last_rank=True)),
    ):
        return worker.AuxOutputWorkerConnector(
            vllm_config=needed, model=None, kv_cache_config=kv_cache
        )
