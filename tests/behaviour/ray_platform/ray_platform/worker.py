# SPDX-License-Identifier: Apache-2.0
"""The CPU worker, as Ray's wrapper wants one."""

import os
from typing import Any

import torch
from vllm.distributed.device_communicators.cpu_communicator import _CPUSHMDistributed
from vllm.v1.worker.cpu_worker import CPUWorker


class RayCpuWorker(CPUWorker):
    """A worker that names its device, which Ray's wrapper selects in each thread."""

    def init_device(self) -> None:
        # The release takes workers on two hosts for neighbours with one shared memory.
        named = _CPUSHMDistributed.make_group_name

        def make_group_name(communicator: Any) -> str:
            return f"{os.stat('/dev/shm').st_dev}-{named(communicator)}"

        _CPUSHMDistributed.make_group_name = staticmethod(make_group_name)
        super().init_device()
        self.device = torch.device("cpu")
