# SPDX-License-Identifier: Apache-2.0
"""A worker extension for the soak: delays the copies of rows to the host."""

from __future__ import annotations

from typing import Any

import torch

CYCLES_PER_MS = 1_900_000  # at the full clock of an H200


class Faults:
    """Mixed into vLLM's worker."""

    def delay_copies(self, ms: float) -> bool:
        """Delay every copy of rows by `ms`, on the stream of the copy. Returns False if the build
        has no such copy."""
        import vllm.v1.outputs as outputs

        tensors = getattr(outputs, "RoutedExpertsTensors", None)
        if tensors is None:
            return False
        copy = getattr(tensors, "undelayed_copy", tensors.to_cpu_nonblocking)
        tensors.undelayed_copy = copy

        def delayed(rows: Any) -> Any:
            if rows.rows.is_cuda:
                torch.cuda._sleep(int(ms * CYCLES_PER_MS))
            return copy(rows)

        tensors.to_cpu_nonblocking = delayed if ms else copy
        return True
