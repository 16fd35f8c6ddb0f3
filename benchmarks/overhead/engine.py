# SPDX-License-Identifier: Apache-2.0
"""One engine of `overhead.py`: a worker process and the socket to it."""

from __future__ import annotations

import contextlib
import json
import socket
import tempfile
import time
from collections.abc import Iterator, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks.common import ROOT, Failure
from benchmarks.overhead.builds import Variant
from harness.process import QUIET, Kept


def engine_options(model: str, kv_gib: float) -> dict[str, Any]:
    """Arguments of the engine that all variants share."""
    if model == "tiny":
        return {
            "max_model_len": 1024,
            "max_num_batched_tokens": 512,
            "max_num_seqs": 16,
            "block_size": 32,
            "enable_prefix_caching": True,
            "enforce_eager": True,
            "kv_cache_memory_bytes": 64 << 20,
            "seed": 0,
        }
    return {
        "max_model_len": 9216,
        "max_num_batched_tokens": 8192,
        "max_num_seqs": 128,
        "enable_prefix_caching": True,
        # A fixed cache size gives all engines the same number of blocks, whatever memory other
        # engines hold.
        "gpu_memory_utilization": 0.1,
        "kv_cache_memory_bytes": int(kv_gib * 2**30),
        "compilation_config": {"cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32, 64, 128]},
        "seed": 0,
    }


@contextlib.contextmanager
def running(
    variant: Variant, settings: dict[str, Any], log: Path, env: Mapping[str, str]
) -> Iterator[Engine]:
    """Start the worker process of an engine, in the repository; `hear` waits for it."""
    with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as listener:
        path = f"{folder}/engine"
        listener.bind(path)
        listener.listen(1)
        listener.settimeout(1.0)
        python = ["-m", "benchmarks.overhead.worker", path, json.dumps(settings)]
        command = variant.build.command(python)
        with Kept(command, log, env, common=QUIET, cwd=ROOT) as process:
            yield Engine(variant, process, listener)


class Engine:
    """A worker process and the socket to it."""

    def __init__(self, variant: Variant, process: Kept, listener: socket.socket) -> None:
        self.variant = variant
        self.process = process
        self._listener = listener
        self._connection: Connection | None = None

    def hear(self, timeout_s: float) -> dict[str, Any]:
        """The next message; the first waits for the worker to connect. Raises Failure if it ended,
        said nothing in time, or says that something failed."""
        ends = time.monotonic() + timeout_s
        while self._connection is None:
            self._look(ends)
            with contextlib.suppress(TimeoutError):
                accepted, _ = self._listener.accept()
                self._connection = Connection(accepted.detach())
        try:
            while not self._connection.poll(1.0):
                self._look(ends)
            message: dict[str, Any] = self._connection.recv()
        except (EOFError, OSError) as error:
            raise Failure(self._told("ended")) from error
        if "error" in message:
            raise Failure(self._told(message["error"]))
        return message

    def ask(self, do: str, timeout_s: float, **arguments: Any) -> dict[str, Any]:
        """Send a command to the worker and wait for its answer. Raises Failure as `hear` does."""
        self.tell(do, **arguments)
        return self.hear(timeout_s)

    def tell(self, do: str, **arguments: Any) -> None:
        """Send a command to the worker; `hear` returns its answer. Raises Failure if it is gone."""
        assert self._connection is not None
        try:
            self._connection.send({"do": do, **arguments})
        except OSError as error:
            raise Failure(self._told(f"is gone: {error}")) from error

    def _look(self, ends: float) -> None:
        if self.process.poll() is not None:
            raise Failure(self._told(f"ended with status {self.process.poll()}"))
        if time.monotonic() > ends:
            raise Failure(self._told("said nothing in time"))

    def _told(self, what: str) -> str:
        tail = self.process.tail(40)
        return f"engine {self.variant.name}: {what}\n--- end of its log ---\n{tail}"
