# SPDX-License-Identifier: Apache-2.0
"""A KV connector that keeps whole blocks of prompts in memory, to send KV past an engine's own
prefix cache on a machine without a transfer library. It can lose a block."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
)

Key = tuple[int, ...]


@dataclass
class Transfers(KVConnectorMetadata):
    """What a step saves and loads: tokens of a prompt, and pairs of its block and a cache block."""

    saves: list[tuple[Key, list[tuple[int, int]]]] = field(default_factory=list)
    loads: list[tuple[Key, list[tuple[int, int]]]] = field(default_factory=list)
    # Cache blocks that fail to load.
    lost: set[int] = field(default_factory=set)


class MemoryConnector(KVConnectorBase_V1):
    """Saves prompts that one step computes completely; loads them for any request."""

    supports_routed_experts = True

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.block_size = vllm_config.cache_config.block_size
        # Of the scheduler.
        self.saved: set[Key] = set()
        self.loads: list[tuple[Key, list[tuple[int, int]]]] = []
        # Index of the block that the next load loses.
        self.lose: int | None = None
        # Of the worker.
        self.blocks: dict[tuple[Key, int], list[torch.Tensor]] = {}
        self.invalid: set[int] = set()

    def _key(self, prompt: list[int]) -> Key:
        return tuple(prompt[: (len(prompt) - 1) // self.block_size * self.block_size])

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int, bool]:
        key = self._key(request.prompt_token_ids)
        return max(len(key) - num_computed_tokens, 0) if key in self.saved else 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if num_external_tokens:
            key = self._key(request.prompt_token_ids)
            stop = len(key) // self.block_size
            indices = range(stop - num_external_tokens // self.block_size, stop)
            (block_ids,) = blocks.get_block_ids()
            self.loads.append((key, [(i, block_ids[i]) for i in indices]))

    def build_connector_meta(self, scheduler_output: Any) -> Transfers:
        transfers = Transfers(loads=self.loads)
        if self.loads and self.lose is not None:
            transfers.lost = {dict(self.loads[0][1])[self.lose]}
            self.lose = None
        self.loads = []
        loaded = {key for key, _ in transfers.loads}
        for request in scheduler_output.scheduled_new_reqs:
            key = self._key(request.prompt_token_ids)
            computed = scheduler_output.num_scheduled_tokens[request.req_id]
            if key not in loaded and computed == len(request.prompt_token_ids):
                count = len(key) // self.block_size
                transfers.saves.append((key, list(enumerate(request.block_ids[0][:count]))))
                self.saved.add(key)
        return transfers

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self.kv_caches = list(kv_caches.values())

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        transfers = self._get_connector_metadata()
        assert isinstance(transfers, Transfers)
        for key, blocks in transfers.loads:
            for index, block_id in blocks:
                for cache, kept in zip(self.kv_caches, self.blocks[key, index], strict=True):
                    cache[:, block_id] = 0 if block_id in transfers.lost else kept
        self.invalid |= transfers.lost

    def wait_for_save(self) -> None:
        transfers = self._get_connector_metadata()
        assert isinstance(transfers, Transfers)
        for key, blocks in transfers.saves:
            for index, block_id in blocks:
                kept = [cache[:, block_id].clone() for cache in self.kv_caches]
                self.blocks[key, index] = kept

    def get_block_ids_with_load_errors(self) -> set[int]:
        invalid, self.invalid = self.invalid, set()
        return invalid

    def wait_for_layer_load(self, layer_name: str) -> None:
        pass

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kw: Any) -> None:
        pass
