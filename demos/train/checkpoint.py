# SPDX-License-Identifier: Apache-2.0
"""The model of the demo: `python -m demos.train.checkpoint FOLDER` makes it, or leaves it as it is.

It is made in the trainer's environment. The trainer's `transformers` may be older than the
server's, and does not read every configuration of a newer one.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from harness.checkpoint import make_checkpoint

# A small Qwen3-MoE of bfloat16 numbers; the routers' logits have a standard deviation of 1.
MODEL: dict[str, Any] = {
    "dtype": "bfloat16",
    "num_hidden_layers": 8,
    "num_experts": 32,
    "moe_intermediate_size": 32,
    "router_std": 0.125,
}

if __name__ == "__main__":
    make_checkpoint(Path(sys.argv[1]), **MODEL)
