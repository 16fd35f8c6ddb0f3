# SPDX-License-Identifier: Apache-2.0
"""Ray gives a worker the resource "GPU", which `ray start` is told to have. No GPU is used."""

from typing import Any

import torch
from vllm.platforms.cpu import CpuPlatform


class RayCpuPlatform(CpuPlatform):
    """A CPU platform whose workers Ray can place."""

    ray_device_key = "GPU"
    # The executor writes the numbers of the GPUs here; the CPU's own variable names NUMA nodes.
    device_control_env_var = "RAY_PLATFORM_VISIBLE_DEVICES"

    @classmethod
    def check_and_update_config(cls, vllm_config: Any) -> None:
        super().check_and_update_config(vllm_config)
        vllm_config.parallel_config.worker_cls = "ray_platform.worker.RayCpuWorker"

    @classmethod
    def set_device(cls, device: torch.device) -> None:
        """Nothing to do: there is one."""
