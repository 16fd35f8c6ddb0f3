# SPDX-License-Identifier: Apache-2.0
"""Offloading of KV without a GPU: vLLM's own manager, with copies between two tensors. vLLM's own
copies need CUDA."""

from __future__ import annotations

from typing import Any

import torch
from vllm.config import KVTransferConfig
from vllm.v1.kv_offload.base import CanonicalKVCaches, OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec

# How many blocks each load of an engine in this process has copied.
LOADED: list[int] = []


def offloading(size: int = 32 << 20) -> dict[str, Any]:
    """Options of an engine whose KV goes to another place in memory too."""
    tier = {
        "spec_name": "HostOffloadingSpec",
        "spec_module_path": __name__,
        "cpu_bytes_to_use": size,
    }
    connector = KVTransferConfig(
        kv_connector="OffloadingConnector", kv_role="kv_both", kv_connector_extra_config=tier
    )
    return {"kv_transfer_config": connector}


class HostOffloadingSpec(CPUOffloadingSpec):
    """`OffloadingConnector` finds it by `spec_name` and `spec_module_path`."""

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        assert self.blocks_per_chunk == 1
        return Copies([cache.tensor for cache in kv_caches.tensors], self.num_chunks)


class Copies(OffloadingWorker):
    """Copies blocks at once, and reports them in the next `get_finished`."""

    def __init__(self, caches: list[torch.Tensor], num_blocks: int) -> None:
        self.caches = caches
        self.kept = [torch.zeros(num_blocks, *cache.shape[1:]).to(cache) for cache in caches]
        self.finished: list[TransferResult] = []

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self._copy(job_id, self.caches, src_spec, self.kept, dst_spec)

    def submit_load(
        self, job_id: int, src_spec: Any, dst_spec: Any, expedited: bool = False
    ) -> bool:
        LOADED.append(len(dst_spec.block_ids))
        return self._copy(job_id, self.kept, src_spec, self.caches, dst_spec)

    def _copy(self, job_id: int, sources: Any, source: Any, targets: Any, target: Any) -> bool:
        for from_, to in zip(sources, targets, strict=True):
            to[target.block_ids] = from_[source.block_ids]
        self.finished.append(TransferResult(job_id, True))
        return True

    def get_finished(self) -> list[TransferResult]:
        finished, self.finished = self.finished, []
        return finished

    def wait(self, job_ids: set[int]) -> None:
        pass
