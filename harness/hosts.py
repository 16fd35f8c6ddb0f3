# SPDX-License-Identifier: Apache-2.0
"""The environment of engines on a host with several GPUs and without a network."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


def environment() -> dict[str, str]:
    """Variables of an engine there; its workers import from the repository."""
    path = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        # NVLink multicast stays off.
        "NCCL_NVLS_ENABLE": "0",
        "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
        "NVSHMEM_DISABLE_NVLS": "1",
        "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        # Without a network, vLLM finds no address.
        "VLLM_HOST_IP": "127.0.0.1",
        "PYTHONPATH": os.pathsep.join(path),
    }


def data_parallel(rank: int, size: int, port: int) -> dict[str, str]:
    """Variables that make an offline engine one rank of a data parallel group of `size`; none for a
    single engine. `port` is the first of several free ports."""
    if size == 1:
        return {}
    return {
        "VLLM_DP_RANK": str(rank),
        "VLLM_DP_RANK_LOCAL": str(rank),
        "VLLM_DP_SIZE": str(size),
        "VLLM_DP_MASTER_IP": "127.0.0.1",
        "VLLM_DP_MASTER_PORT": str(port),
    }


def leave(llm: Any) -> None:
    """End the process of an offline engine without waiting long: the keeper ends what is left."""
    shutdown = threading.Thread(target=llm.llm_engine.engine_core.shutdown, daemon=True)
    shutdown.start()
    shutdown.join(10)
    os._exit(0)
