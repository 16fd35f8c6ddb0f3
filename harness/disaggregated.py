# SPDX-License-Identifier: Apache-2.0
"""How a prefill and a decode engine are started on one machine."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

from harness.process import free_port
from harness.server import Server, ServerError

PREFILL, DECODE = "kv_producer", "kv_consumer"
# Seconds after which a prefill engine with NIXL gives up KV that nobody fetched.
GIVEN_UP = 15

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


def nixl(role: str, device: str = "cpu") -> tuple[list[str], dict[str, str]]:
    """Arguments and variables of `vllm serve` for engines that send KV over loopback with NIXL.

    Args:
        role: `PREFILL` or `DECODE`.
        device: "cpu", or "cuda" to send from the memory of one GPU to that of another.
    """
    environment = {
        "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port()),
        "VLLM_NIXL_ABORT_REQUEST_TIMEOUT": str(GIVEN_UP),
    }
    if device == "cpu":
        cores = sorted(os.sched_getaffinity(0))
        # A core each: threads that wait for each other stall on a busy machine.
        core = str(cores[0] if role == PREFILL else cores[-1])
        # Sockets, not shared memory. UCX refuses the loopback device.
        environment |= {"VLLM_CPU_OMP_THREADS_BIND": core, "UCX_TLS": "tcp"}
    return _connector("NixlConnector", role, {}, kv_buffer_device=device), environment


def wait_until_idle(server: Server, timeout_s: float = GIVEN_UP + 60) -> None:
    """Wait until an engine holds no request and no KV block. It gives up KV that nobody fetched
    only while it computes, so it gets small requests.

    Raises:
        ServerError: it still holds something after `timeout_s` seconds.
    """
    end = time.monotonic() + timeout_s
    names = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
    while held := {name: value for name in names if (value := server.metric(name))}:
        if time.monotonic() > end:
            raise ServerError(f"the engine still holds requests or KV: {held}")
        time.sleep(0.5)
        server.generate([5, 6, 7], max_tokens=1)


def _connector(name: str, role: str, extra: dict[str, str], **more: str) -> list[str]:
    config = {
        "kv_connector": name,
        "kv_role": role,
        "kv_connector_extra_config": extra,
        **more,
    }
    return ["--enable-return-routed-experts", f"--kv-transfer-config={json.dumps(config)}"]
