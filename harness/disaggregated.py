# SPDX-License-Identifier: Apache-2.0
"""How the two engines are started: they share KV through files, which needs no other machine."""

from __future__ import annotations

import json
from pathlib import Path

PREFILL, DECODE = "kv_producer", "kv_consumer"

# Name of the counter of prompt tokens whose KV an engine received.
RECEIVED = "vllm:external_prefix_cache_hits_total"


def arguments(storage: Path, role: str) -> list[str]:
    """Arguments of `vllm serve`.

    Args:
        storage: folder for the KV, the same for both engines.
        role: `PREFILL` or `DECODE`.
    """
    config = {
        "kv_connector": "ExampleConnector",
        "kv_role": role,
        "kv_connector_extra_config": {"shared_storage_path": str(storage)},
    }
    return [
        "--enable-return-routed-experts",
        f"--kv-transfer-config={json.dumps(config)}",
        # This connector saves the KV of what a prompt's first step computes.
        "--no-enable-chunked-prefill",
        "--max-num-batched-tokens=2048",
    ]
