# SPDX-License-Identifier: Apache-2.0
"""The environment of engines on a host with several GPUs and without a network."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def environment() -> dict[str, str]:
    """Variables of an engine there; its workers import from the repository."""
    path = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        # NVLink multicast stays off, whatever starts the processes.
        "NCCL_NVLS_ENABLE": "0",
        "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
        "NVSHMEM_DISABLE_NVLS": "1",
        "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        # Without a network, vLLM finds no address of its own.
        "VLLM_HOST_IP": "127.0.0.1",
        "PYTHONPATH": os.pathsep.join(path),
    }


def data_parallel(rank: int, size: int, port: int) -> dict[str, str]:
    """Variables that join an offline engine to the others of its data parallel group; none for a
    single one. `port` is the first of some free ones."""
    if size == 1:
        return {}
    return {
        "VLLM_DP_RANK": str(rank),
        "VLLM_DP_RANK_LOCAL": str(rank),
        "VLLM_DP_SIZE": str(size),
        "VLLM_DP_MASTER_IP": "127.0.0.1",
        "VLLM_DP_MASTER_PORT": str(port),
    }
