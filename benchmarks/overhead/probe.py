# SPDX-License-Identifier: Apache-2.0
"""Reads what only the process with the GPU knows: its memory and the kernels that it runs.

vLLM mixes `Probe` into its worker class (`worker_extension_cls`).
"""

from __future__ import annotations

import gc
from collections import Counter
from typing import Any


def kernels_of_a_step(few: Counter[str], many: Counter[str], steps: int) -> dict[str, Any]:
    """Kernels and copies of one step, from two runs of which one has `steps` more."""
    by_name = {name: (many[name] - few[name]) / steps for name in sorted(many)}
    copies = sum(v for n, v in by_name.items() if n.startswith(("Memcpy", "Memset")))
    return {
        "kernels": sum(by_name.values()) - copies,
        "copies": copies,
        "by_name": {n: v for n, v in by_name.items() if v},
    }


class Probe:
    """Methods for `LLM.collective_rpc`."""

    def probe_device(self) -> str:
        """Name of the GPU, or empty."""
        import torch

        return torch.cuda.get_device_name() if torch.cuda.is_available() else ""

    def probe_memory(self) -> dict[str, int]:
        """Peak bytes that torch allocated and reserved on the GPU; empty without one."""
        import torch

        if not torch.cuda.is_available():
            return {}
        return {
            "gpu_allocated": torch.cuda.max_memory_allocated(),
            "gpu_reserved": torch.cuda.max_memory_reserved(),
        }

    def probe_settle(self) -> None:
        """Collect garbage, and exempt the remaining objects from later collections."""
        gc.collect()
        gc.freeze()

    def probe_profile_start(self) -> None:
        """Start recording what runs on the GPU."""
        import torch

        self._probe_profile = torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CUDA]
        )
        self._probe_profile.__enter__()

    def probe_profile_stop(self) -> dict[str, int]:
        """Number of runs since then, by name of the kernel or kind of copy."""
        import torch

        torch.cuda.synchronize()
        self._probe_profile.__exit__(None, None, None)
        events = self._probe_profile.events()
        del self._probe_profile
        cuda = torch.autograd.DeviceType.CUDA
        return dict(Counter(event.name for event in events if event.device_type == cuda))
