# SPDX-License-Identifier: Apache-2.0
"""How a prefill and a decode engine are started on one machine."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx

from harness.process import Kept, free_port
from harness.server import Server, ServerError

ROOT = Path(__file__).resolve().parents[1]
PREFILL, DECODE = "kv_producer", "kv_consumer"
# vLLM's own proxy for NIXL, in its source tree.
PLAIN_PROXY = "tests/v1/kv_connector/nixl_integration/toy_proxy_server.py"
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


@contextlib.contextmanager
def plain_proxy(line: str, prefill: Server, decode: Server, log: Path) -> Iterator[str]:
    """Run vLLM's own proxy for NIXL, unchanged, from its source tree; yields its URL.

    It passes the `kv_transfer_params` of the prefill engine's answer on, and joins nothing. It
    serves /v1/completions and /v1/chat/completions.

    Args:
        line: of `patches/`, whose tree has the proxy.
        prefill: the prefill engine.
        decode: the decode engine.
        log: file for the proxy's output, overwritten.

    Raises:
        ServerError: the proxy ended before it was ready.
    """
    port = free_port()
    program = ROOT / "build" / line / "vllm" / PLAIN_PROXY
    command = [sys.executable, str(program), f"--port={port}"]
    for role, server in (("prefiller", prefill), ("decoder", decode)):
        command += [f"--{role}-host=127.0.0.1", f"--{role}-port={server.port}"]
    url = f"http://127.0.0.1:{port}"
    with Kept(command, log) as process:
        while True:
            with contextlib.suppress(httpx.TransportError):
                httpx.get(f"{url}/healthcheck", trust_env=False, timeout=60).raise_for_status()
                break
            if process.poll() is not None:
                raise ServerError(f"vLLM's proxy ended: {process.first_error()} (log: {log})")
            time.sleep(0.1)
        yield url
