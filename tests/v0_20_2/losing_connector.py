# SPDX-License-Identifier: Apache-2.0
"""vLLM's connector that keeps KV in files, made to lose a block."""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.example_connector import ExampleConnector


class LosingConnector(ExampleConnector):
    """Loads what it saved, but for the block that it is told to lose."""

    supports_routed_experts = True

    # Index, within its prompt, of the block that the next load loses.
    lose: int | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.lost: set[int] = set()

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        super().start_load_kv(forward_context, **kwargs)
        loads = [r for r in self._get_connector_metadata().requests if not r.is_store]
        if not loads or self.lose is None:
            return
        block_id = int(loads[0].slot_mapping[self.lose * self._block_size]) // self._block_size
        for layer in forward_context.no_compile_layers.values():
            if hasattr(layer, "kv_cache"):
                layer.kv_cache[:, block_id] = 0
        self.lost, self.lose = {block_id}, None

    def get_block_ids_with_load_errors(self) -> set[int]:
        lost, self.lost = self.lost, set()
        return lost
