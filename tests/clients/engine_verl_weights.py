# SPDX-License-Identifier: Apache-2.0
"""verl's own path for weights, from its trainer's side to its worker in vLLM, with the server of
`engine_verl.py`. The variable WEIGHTS has the checkpoint whose weights are sent.

Without a GPU, verl sends them through shared memory. Its trainer waits for the worker, so it has a
thread of its own here. Ray's remote calls go to the loop of the server.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import sys
import traceback
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from driving import PROMPT, Turn, make_turn
from engine_verl import ask, make_server
from safetensors.torch import load_file


def end_if_failed(called: Future[Any]) -> None:
    """verl's trainer would wait for the worker's answer without end."""
    if (error := called.exception()) is not None:
        traceback.print_exception(error)
        sys.stderr.flush()
        for child in multiprocessing.active_children():
            child.kill()
        os._exit(1)


class Remote:
    """A server as a Ray actor's handle."""

    def __init__(self, server: Any, loop: asyncio.AbstractEventLoop) -> None:
        self.server = server
        self.loop = loop

    def __getattr__(self, name: str) -> Any:
        method = getattr(self.server, name)

        def remote(*args: Any, **kwargs: Any) -> asyncio.Future[Any]:
            called = asyncio.run_coroutine_threadsafe(method(*args, **kwargs), self.loop)
            called.add_done_callback(end_if_failed)
            return asyncio.wrap_future(called)

        return SimpleNamespace(remote=remote)


def make_sender(server: Any, loop: asyncio.AbstractEventLoop) -> Any:
    """What verl's trainer sends weights with."""
    from verl.workers.rollout.vllm_rollout.vllm_rollout import ServerAdapter
    from worker_verl import do_without_gpu

    do_without_gpu()
    sender = ServerAdapter.__new__(ServerAdapter)
    sender.config = server.config
    sender.server_handle = Remote(server, loop)
    sender.replica_rank = sender.rollout_rank = 0
    sender._has_server = sender.use_shm = True
    sender.zmq_handle = "ipc:///tmp/rl-colocate-zmq-job-replica-0-rank-0.sock"
    return sender


def roll_out(checkpoint: str) -> Iterator[tuple[str, Iterable[Turn]]]:
    prompt = np.random.default_rng(0).integers(4, 700, PROMPT).tolist()

    def turn(weights: str | None) -> Iterator[Turn]:
        if weights:
            named = load_file(Path(weights) / "model.safetensors")
            runner.run(asyncio.to_thread(send, named))
        yield make_turn(prompt, [runner.run(ask(server, prompt))])

    def send(named: dict[str, Any]) -> None:
        asyncio.run(sender.update_weights(iter(named.items())))

    with asyncio.Runner() as runner:
        server = make_server(checkpoint)
        server._get_worker_extension_cls = lambda: "worker_verl.Worker"
        os.environ["PYTHONPATH"] += os.pathsep + str(Path(__file__).parent)  # of its processes
        server._server_address = "127.0.0.1"  # else the host's own
        runner.run(server.launch_server())
        sender = make_sender(server, runner.get_loop())
        try:
            yield "old weights", turn(None)
            yield "new weights", turn(os.environ["WEIGHTS"])
            yield "old weights again", turn(checkpoint)
            yield "the same weights", turn(checkpoint)
        finally:
            server.engine.shutdown()
