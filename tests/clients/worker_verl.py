# SPDX-License-Identifier: Apache-2.0
"""verl's part of vLLM's worker, on a CPU.

verl knows only accelerators, and waits for them. It copies weights out of shared memory to them;
here tensors stay in it, so it cannot be closed. On a CPU, vLLM packs the weights of linear layers
and drops them: they stay without oneDNN.
"""

from __future__ import annotations

from multiprocessing.shared_memory import SharedMemory
from typing import Any

import torch
from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension
from vllm import _custom_ops as ops


def do_without_gpu() -> None:
    torch.cuda.synchronize = torch.cuda.ipc_collect = lambda *_: None  # type: ignore[assignment]


class Worker(vLLMColocateWorkerExtension):  # type: ignore[misc]
    def __new__(cls, **kwargs: Any) -> Any:
        do_without_gpu()
        ops._supports_onednn = False
        SharedMemory.close = lambda _: None  # type: ignore[method-assign]
        return super().__new__(cls, **kwargs)

    def update_weights_from_ipc(self, *args: Any, **kwargs: Any) -> None:
        self.device = torch.device("cpu")
        super().update_weights_from_ipc(*args, **kwargs)
