# SPDX-License-Identifier: Apache-2.0
"""Workers of vLLM's Ray executor return true rows. Ray's processes, actors and
channels are real, and started by the script of the image; the workers compute on CPUs."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil
import pytest

from examples.client import Completion
from harness.lines import LINES
from harness.process import Kept, free_port
from harness.server import Server, ServerError
from tests.behaviour.conftest import CHUNK
from tests.behaviour.test_layouts import ask_all, assert_true
from tests.real import PROJECT

pytestmark = pytest.mark.slow

NODE = str(PROJECT.root / "deploy/image/ray-node.sh")
PLATFORM = Path(__file__).with_name("ray_platform")
# Two hosts and the cable between them: this machine's network namespace, and another one.
HOSTS = ("198.18.0.1", "198.18.0.2")
CABLE, OTHER = "re-cable", "re-other"
# Loopback addresses of nodes on one host.
NODES = ("127.0.0.2", "127.0.0.3")
# Processes of the other host see neither this host's processes nor its shared memory.
ON_OTHER = [
    *("ip", "netns", "exec", OTHER, "unshare", "--mount", "--pid", "--fork", "--kill-child"),
    *("--mount-proc", "sh", "-c", 'mount -t tmpfs tmpfs /dev/shm && exec "$@"', "sh"),
]


def environment(folder: Path, address: str, port: int, gpus: int) -> dict[str, str]:
    """Variables of one node. The name of `folder` must be short, because of Ray's sockets."""
    line = LINES[PROJECT.line].variables()
    path = [str(PLATFORM), *filter(None, [line.get("PYTHONPATH", os.environ.get("PYTHONPATH"))])]
    return {
        **line,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join(path),
        "NODE": address,
        "RAY_PORT": str(port),
        "RAY_TMPDIR": str(folder),
        "RAY_OVERRIDE_RESOURCES": json.dumps({"CPU": 2, "GPU": gpus}),
        "VLLM_USE_RAY_COMPILED_DAG_CHANNEL_TYPE": "shm",
        "VLLM_CPU_OMP_THREADS_BIND": "0|1" if gpus == 2 else "all",
        "GLOO_SOCKET_IFNAME": CABLE if address in HOSTS else "lo",
        # Ray ends actors when little memory is free on the machine, whoever has taken it.
        "RAY_memory_monitor_refresh_ms": "0",
    }


@pytest.fixture
def hosts() -> Iterator[tuple[str, str]]:
    """Addresses of this host and of another one: a network namespace, and a cable to it."""
    if os.geteuid() or not shutil.which("ip"):
        pytest.skip("wants root and `ip` (Debian: iproute2) for a network namespace")
    here, there = (f"{address}/30" for address in HOSTS)
    try:
        for command in (
            f"ip netns add {OTHER}",
            f"ip link add {CABLE} type veth peer name {CABLE} netns {OTHER}",
            f"ip address add {here} dev {CABLE}",
            f"ip link set {CABLE} up",
            f"ip -n {OTHER} address add {there} dev {CABLE}",
            f"ip -n {OTHER} link set {CABLE} up",
            f"ip -n {OTHER} link set lo up",
        ):
            subprocess.run(command.split(), check=True)
        yield HOSTS
    finally:
        subprocess.run(["ip", "netns", "del", OTHER], check=True)


@contextmanager
def cluster(
    model: Path,
    log: Path,
    *arguments: str,
    nodes: int = 1,
    addresses: tuple[str, ...] = NODES,
) -> Iterator[Server]:
    """A server whose two workers are actors on one or two Ray nodes, at these addresses."""
    port = free_port()
    # pytest's folders have names that are too long for Ray's sockets.
    with tempfile.TemporaryDirectory(prefix="ray", dir="/tmp") as name, ExitStack() as stack:
        folders = [Path(name, str(number)) for number in range(nodes)]
        for number in range(1, nodes):
            variables = environment(folders[number], addresses[number], port, gpus=1)
            # Nodes that start at once on one machine take each other's ports.
            wait = 'until grep -q "Ray runtime started" "$0"; do sleep 1; done; exec "$1" worker'
            place = ON_OTHER if addresses == HOSTS else []
            worker = Kept(
                [*place, "bash", "-c", wait, str(log), NODE],
                log.with_suffix(f".{number}"),
                variables | {"HEAD": addresses[0]},
            )
            stack.enter_context(worker)
        server = Server(
            model,
            log,
            ["--enable-return-routed-experts", f"--max-num-batched-tokens={CHUNK}", *arguments],
            environment(folders[0], addresses[0], port, gpus=2 // nodes),
            program=[NODE, "head"],
        )
        yield stack.enter_context(server)


def actors(server: Server) -> list[psutil.Process]:
    """The processes of the workers (RayWorkerWrapper, or RayWorkerProc)."""
    tree = psutil.Process(server.pid).children(recursive=True)
    return [p for p in tree if p.cmdline()[:1] and "RayWorker" in p.cmdline()[0]]


@pytest.mark.parametrize(
    ("layout", "nodes"),
    [
        ("--tensor-parallel-size=2", 1),
        ("--pipeline-parallel-size=2", 1),
        ("--pipeline-parallel-size=2", 2),
    ],
)
def test_rows_of_two_ray_workers_are_true(
    model: Path, tmp_path: Path, layout: str, nodes: int
) -> None:
    with cluster(model, tmp_path / "server.log", layout, nodes=nodes) as server:
        assert len(actors(server)) == 2 // nodes
        assert_true(model, ask_all(server))
        # Many steps through the same channels.
        steps = 60 if LINES[PROJECT.line].tests["slow_engines"] else 300
        prompts = [[5 + number, 6, 7] for number in range(8)]

        def complete(prompt: list[int]) -> Completion:
            return server.generate(prompt, timeout_s=300, max_tokens=steps, ignore_eos=True)

        with ThreadPoolExecutor(len(prompts)) as pool:
            assert_true(model, list(pool.map(complete, prompts)))


def test_rows_of_two_hosts_are_true(model: Path, tmp_path: Path, hosts: tuple[str, str]) -> None:
    """The second stage runs on a host that shares only a network with the first one."""
    layout = "--pipeline-parallel-size=2"
    log = tmp_path / "server.log"
    with cluster(model, log, layout, nodes=2, addresses=hosts) as server:
        assert len(actors(server)) == 1
        assert_true(model, ask_all(server))


def test_dead_ray_worker_ends_the_answer_with_an_error(model: Path, tmp_path: Path) -> None:
    with cluster(model, tmp_path / "server.log", "--tensor-parallel-size=2") as server:
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(server.generate, [5, 6, 7], max_tokens=1000, ignore_eos=True)
            while not server.metric("vllm:num_requests_running"):
                assert not answer.done(), "the answer ended before the worker"
                time.sleep(0.05)
            actors(server)[0].send_signal(signal.SIGKILL)
            with pytest.raises(ServerError):
                answer.result(timeout=120)
        end = time.monotonic() + 60
        while server.poll() is None:  # it ends: what supervises it starts another
            assert time.monotonic() < end
            time.sleep(0.2)
