# SPDX-License-Identifier: Apache-2.0
"""How a prefill and a decode engine are started on one machine without a GPU."""

from __future__ import annotations

import json
from pathlib import Path

from harness.process import free_port

PREFILL, DECODE = "kv_producer", "kv_consumer"

# Name of the counter of prompt tokens whose KV an engine received.
RECEIVED = "vllm:external_prefix_cache_hits_total"


def arguments(storage: Path, role: str) -> list[str]:
    """Arguments of `vllm serve` for engines that share KV through files.

    Args:
        storage: folder for the KV, the same for both engines.
        role: `PREFILL` or `DECODE`.
    """
    return [
        *_connector("ExampleConnector", role, {"shared_storage_path": str(storage)}),
        # This connector saves the KV of what a prompt's first step computes.
        "--no-enable-chunked-prefill",
        "--max-num-batched-tokens=2048",
    ]


def nixl(role: str) -> tuple[list[str], dict[str, str]]:
    """Arguments and variables of `vllm serve` for engines that send KV over loopback with NIXL.

    Args:
        role: `PREFILL` or `DECODE`.
    """
    environment = {
        "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port()),
        # Sockets, not shared memory. UCX refuses the loopback device.
        "UCX_TLS": "tcp",
    }
    return _connector("NixlConnector", role, {}, kv_buffer_device="cpu"), environment


def _connector(name: str, role: str, extra: dict[str, str], **more: str) -> list[str]:
    config = {
        "kv_connector": name,
        "kv_role": role,
        "kv_connector_extra_config": extra,
        **more,
    }
    return ["--enable-return-routed-experts", f"--kv-transfer-config={json.dumps(config)}"]
