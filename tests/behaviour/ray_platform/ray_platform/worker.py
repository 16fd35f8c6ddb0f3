# SPDX-License-Identifier: Apache-2.0
"""The CPU worker, as Ray's wrapper wants one."""

import torch
from vllm.v1.worker.cpu_worker import CPUWorker


class RayCpuWorker(CPUWorker):
    """A worker that names its device, which Ray's wrapper selects in each thread."""

    def init_device(self) -> None:
        super().init_device()
        self.device = torch.device("cpu")
