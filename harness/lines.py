# SPDX-License-Identifier: Apache-2.0
"""What differs between the lines of `patches/` when their `vllm serve` runs on a CPU."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

# A folder for PYTHONPATH: the package `triton_interpreted`, and metadata that Triton finds it by.
_INTERPRETED = Path(__file__).with_name("interpreted")
# A second one: the package `cohere`. Without it, v0.33.0 has no `/cohere/v2/chat`.
_STAND_INS = Path(__file__).with_name("stand_ins")


@dataclass(frozen=True)
class Line:
    """A line's server, on top of `server.ARGUMENTS` and `process.ENVIRONMENT`.

    Attributes:
        arguments: of `vllm serve`; they override `ARGUMENTS`.
        environment: variables; they override `ENVIRONMENT`.
        packages: folders to put first on PYTHONPATH.
        ready_s: seconds that the server may take to be ready.
    """

    arguments: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    packages: tuple[Path, ...] = ()
    ready_s: float = 300.0

    def variables(self) -> dict[str, str]:
        """`environment`, and PYTHONPATH if the line has `packages`."""
        if not self.packages:
            return dict(self.environment)
        paths = [*map(str, self.packages), *filter(None, [os.environ.get("PYTHONPATH")])]
        return {**self.environment, "PYTHONPATH": os.pathsep.join(paths)}


FIRST = "v0.20.2"
LINES: dict[str, Line] = {
    FIRST: Line(),
    # Model Runner V2 returns the rows. Its Triton kernels run in Triton's interpreter. The model is
    # compiled, as by default: the release loses the rows there.
    "v0.33.0": Line(
        arguments=(
            "--no-enforce-eager",
            "--kernel-config.enable_jit_warmup=false",
            "--enable-scale-out",  # /inference/v1/generate
        ),
        environment={
            "TORCH_COMPILE_DISABLE": "0",
            "TRITON_INTERPRET": "1",
            "VLLM_USE_V2_MODEL_RUNNER": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
        },
        packages=(_INTERPRETED, _STAND_INS),
        ready_s=900.0,
    ),
}
