# SPDX-License-Identifier: Apache-2.0
"""Offloading of KV without a GPU: vLLM's own manager, with copies between two tensors. vLLM's own
copies need CUDA."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec
from vllm.v1.kv_offload.mediums import CPULoadStoreSpec, GPULoadStoreSpec
from vllm.v1.kv_offload.worker.worker import OffloadingHandler, TransferResult


class HostOffloadingSpec(CPUOffloadingSpec):
    """For `OffloadingConnector`, by `spec_name` and `spec_module_path`."""

    def get_handlers(self, kv_caches: Any) -> Iterator[tuple[type, type, OffloadingHandler]]:
        caches = [cache.tensor for cache in kv_caches.tensors]
        kept = [torch.zeros(self.num_blocks, *cache.shape[1:]).to(cache) for cache in caches]
        yield GPULoadStoreSpec, CPULoadStoreSpec, Copies(caches, kept)
        yield CPULoadStoreSpec, GPULoadStoreSpec, Copies(kept, caches)


class Copies(OffloadingHandler):
    """Copies blocks at once, and reports them in the next `get_finished`."""

    def __init__(self, sources: list[torch.Tensor], targets: list[torch.Tensor]) -> None:
        self.sources, self.targets = sources, targets
        self.finished: list[TransferResult] = []

    def transfer_async(self, job_id: int, spec: Any) -> bool:
        source, target = spec
        for from_, to in zip(self.sources, self.targets, strict=True):
            to[target.block_ids] = from_[source.block_ids]
        self.finished.append(TransferResult(job_id, True))
        return True

    def get_finished(self) -> list[TransferResult]:
        finished, self.finished = self.finished, []
        return finished

    def wait(self, job_ids: set[int]) -> None:
        pass
