# SPDX-License-Identifier: Apache-2.0
"""How a prefill and a decode engine are started on one machine."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from examples import proxy
from harness.lines import installed
from harness.process import Kept, free_port
from harness.server import Server, ServerError

ROOT = Path(__file__).resolve().parents[1]
PREFILL, DECODE = "kv_producer", "kv_consumer"
# vLLM's own proxy for NIXL, in its source tree.
PLAIN_PROXY = "tests/v1/kv_connector/nixl_integration/toy_proxy_server.py"
# Seconds after which a prefill engine with NIXL frees KV that nobody fetched. A busy machine needs
# long to fetch it.
GIVEN_UP = 60
_LEASE = {"kv_lease_duration": GIVEN_UP}  # v0.33.0 reads this, v0.20.2 an environment variable

# Name of the counter of prompt tokens whose KV an engine received.
RECEIVED = "vllm:external_prefix_cache_hits_total"
# Name of the counter of prompt tokens that an engine found in its own cache.
CACHED = "vllm:prefix_cache_hits_total"

# Gives the arguments of `vllm serve` and the environment variables of a role.
Way = Callable[[str], tuple[Sequence[str], Mapping[str, str]]]


@dataclass(frozen=True)
class Pair:
    """A prefill and a decode engine of a line."""

    prefill: Server
    decode: Server
    url: str  # of `examples/proxy.py` in front of them
    line: str


@contextlib.contextmanager
def running(model: Path, folder: Path, way: Way, line: str | None = None) -> Iterator[Pair]:
    """Run both engines, of the installed line by default, and the proxy. Their logs are
    `<role>.log`."""
    line = line or installed()
    servers = []
    for role in (PREFILL, DECODE):
        arguments, variables = way(role)
        arguments = [*arguments, "--enforce-eager"]  # compiling takes minutes
        servers.append(Server(model, folder / f"{role}.log", arguments, variables, line=line))
    with contextlib.ExitStack() as stack:
        with ThreadPoolExecutor() as pool:  # they take long to start
            started = [pool.submit(stack.enter_context, server) for server in servers]
        prefill, decode = (future.result() for future in started)
        url = stack.enter_context(proxy.running(prefill.url, decode.url))
        yield Pair(prefill, decode, url, line)


def files(storage: Path) -> Way:
    """Engines that share KV through files in a folder, each on a core of its own."""
    return lambda role: (arguments(storage, role), {"VLLM_CPU_OMP_THREADS_BIND": _core(role)})


def both(storage: Path) -> Way:
    """Engines that send KV with NIXL, and share it through files too (MultiConnector)."""

    def way(role: str) -> tuple[Sequence[str], Mapping[str, str]]:
        connectors = [
            _config("NixlConnector", role, _LEASE, kv_buffer_device="cpu"),
            _config("ExampleConnector", role, {"shared_storage_path": str(storage)}),
        ]
        first = _connector("MultiConnector", role, {"connectors": connectors})
        return [*first, *_WHOLE_PROMPTS], nixl(role)[1]

    return way


# ExampleConnector saves the KV of what a prompt's first step computes.
_WHOLE_PROMPTS = ("--no-enable-chunked-prefill", "--max-num-batched-tokens=2048")


def arguments(storage: Path, role: str) -> list[str]:
    """Arguments of `vllm serve` for a role, `PREFILL` or `DECODE`, that shares KV through files."""
    first = _connector("ExampleConnector", role, {"shared_storage_path": str(storage)})
    return [*first, *_WHOLE_PROMPTS]


def nixl(role: str, device: str = "cpu") -> tuple[list[str], dict[str, str]]:
    """Arguments and variables of `vllm serve` for a role that sends KV over loopback with NIXL.
    With the device "cuda", it goes from the memory of one GPU to that of another."""
    environment = {
        "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port()),
        "VLLM_NIXL_ABORT_REQUEST_TIMEOUT": str(GIVEN_UP),
        # Keep connections open. Otherwise the server may close one while the proxy sends.
        "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "3600",
    }
    if device == "cpu":
        # Sockets, not shared memory. UCX refuses the loopback device.
        environment |= {"VLLM_CPU_OMP_THREADS_BIND": _core(role), "UCX_TLS": "tcp"}
    return _connector("NixlConnector", role, _LEASE, kv_buffer_device=device), environment


def wait_until_idle(server: Server, timeout_s: float = GIVEN_UP + 60) -> None:
    """Wait until an engine holds no request and no KV block, or raise ServerError. It gives up KV
    that nobody fetched only while it computes, so it gets small requests."""
    end = time.monotonic() + timeout_s
    names = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
    while held := {name: value for name in names if (value := server.metric(name))}:
        if time.monotonic() > end:
            raise ServerError(f"the engine still holds requests or KV: {held}")
        time.sleep(0.5)
        server.generate([5, 6, 7], max_tokens=1)


def _core(role: str) -> str:
    """A core of its own: threads that wait for each other stall on a busy machine."""
    cores = sorted(os.sched_getaffinity(0))
    return str(cores[0] if role == PREFILL else cores[-1])


def _config(name: str, role: str, extra: dict[str, Any], **more: str) -> dict[str, Any]:
    return {"kv_connector": name, "kv_role": role, "kv_connector_extra_config": extra, **more}


def _connector(name: str, role: str, extra: dict[str, Any], **more: str) -> list[str]:
    config = json.dumps(_config(name, role, extra, **more))
    return ["--enable-return-routed-experts", f"--kv-transfer-config={config}"]


@contextlib.contextmanager
def plain_proxy(pair: Pair, log: Path) -> Iterator[str]:
    """Run vLLM's own proxy for NIXL, unchanged, from its source tree; yields its URL. It passes the
    `kv_transfer_params` of the prefill engine's answer on, and joins nothing. It serves completions
    and chat. Raises ServerError if it ends before it is ready."""
    port = free_port()
    program = ROOT / "build" / pair.line / "vllm" / PLAIN_PROXY
    command = [sys.executable, str(program), f"--port={port}"]
    for role, server in (("prefiller", pair.prefill), ("decoder", pair.decode)):
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
