# SPDX-License-Identifier: Apache-2.0
"""The processes: the server, with a probe in its event loop, and a stub of the engine."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec
import numpy as np
import zmq
from vllm.entrypoints.cli.serve import make_arg_parser
from vllm.entrypoints.openai.api_server import run_server_worker
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.core.routed_experts import RoutedExpertsManager
from vllm.v1.core.sched.output import NewRequestData, SchedulerOutput
from vllm.v1.engine import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreReadyResponse,
    EngineCoreRequest,
    EngineCoreRequestType,
    UtilityOutput,
)
from vllm.v1.outputs import RoutedExpertsLists
from vllm.v1.request import Request, RequestStatus
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder, UtilityResult

from benchmarks.event_loop import Probe
from benchmarks.front.loads import Load
from harness.scheduling import kv_cache_manager

EXPERTS = 256
BLOCK = 16


class Engine:
    """The stub of the engine. The scheduler's own code packs its rows."""

    def __init__(self, addresses: dict[str, str], pool: np.ndarray, parent: Connection) -> None:
        self.pool = pool
        self.parent = parent
        context = zmq.Context.instance()
        self.requests = context.socket(zmq.DEALER)
        self.requests.setsockopt(zmq.IDENTITY, (0).to_bytes(2, "little"))
        self.requests.connect(addresses["input_address"])
        self.outputs = context.socket(zmq.PUSH)
        self.outputs.setsockopt(zmq.SNDHWM, 0)
        self.outputs.connect(addresses["output_address"])
        self.encoder = MsgpackEncoder()
        ready = EngineCoreReadyResponse(10**9, num_gpu_blocks=1, dp_stats_address=None)
        self.requests.send(msgspec.msgpack.encode(ready))

    def serve(self) -> None:
        """Run the loads that the parent announces, until the parent ends."""
        decode_request, decode = MsgpackDecoder(EngineCoreRequest), MsgpackDecoder()
        told: list[Load] = []
        waiting: list[EngineCoreRequest] = []
        poller = zmq.Poller()
        poller.register(self.requests, zmq.POLLIN)
        poller.register(self.parent.fileno(), zmq.POLLIN)
        while True:
            for source, _ in poller.poll():
                if source == self.parent.fileno():
                    try:
                        told.append(self.parent.recv())
                    except EOFError:
                        return
                    continue
                kind, *frames = self.requests.recv_multipart(copy=False)
                kind = EngineCoreRequestType(bytes(kind.buffer))
                if kind == EngineCoreRequestType.ADD:
                    waiting.append(decode_request.decode(frames))
                elif kind == EngineCoreRequestType.UTILITY:
                    _, call, method, _ = decode.decode(frames)
                    result = ("generate",) if method == "get_supported_tasks" else None
                    output = UtilityOutput(call, result=UtilityResult(result))
                    self.send(EngineCoreOutputs(utility_output=output))
            if told and len(waiting) == told[0].requests:
                # Taking requests in is not measured.
                time.sleep(0.1)
                self.parent.send(self.answer(told.pop(), waiting))
                waiting.clear()

    def send(self, message: EngineCoreOutputs) -> None:
        self.outputs.send_multipart(self.encoder.encode(message), copy=False)

    def answer(self, load: Load, waiting: Sequence[EngineCoreRequest]) -> float:
        """Send all outputs of the requests. Returns the time at which this began."""
        for sent in waiting:
            sent.prompt_token_ids = [5] * load.prompt
        requests = {r.request_id: Request.from_engine_core_request(r, None) for r in waiting}
        blocks = (load.prompt + load.steps * load.tokens) // BLOCK + 1
        kv_blocks = len(requests) * blocks + 1
        kv_cache = kv_cache_manager(kv_blocks, blocks * BLOCK)
        manager = RoutedExpertsManager(kv_cache)
        manager.rows.reserve(*self.pool.shape[1:], "uint8")
        asking = [r for r in requests.values() if manager.returns_rows(r)]
        scheduled = SchedulerOutput.make_empty()
        scheduled.scheduled_new_reqs = [
            NewRequestData.from_request(
                request, (list(range(i * blocks + 1, (i + 1) * blocks + 1)),)
            )
            for i, request in enumerate(asking)
        ]
        position = 0
        began = time.monotonic()
        for number in range(load.steps):
            if asking:
                scheduled.step = number + 1
                manager.on_step_scheduled(scheduled, requests)
                scheduled.scheduled_new_reqs = []
            for request in requests.values():
                request.append_output_token_ids([7] * load.tokens)
                if number == load.steps - 1:
                    request.status = RequestStatus.FINISHED_LENGTH_CAPPED
            outputs = [
                EngineCoreOutput(
                    req_id, [7] * load.tokens, finish_reason=request.get_finished_reason()
                )
                for req_id, request in requests.items()
            ]
            message = EngineCoreOutputs(outputs=outputs)
            end = load.prompt + (number + 1) * load.tokens - 1
            if asking:
                manager.update(self.rows_of(asking, position, end), number + 1)
                for request in asking:
                    if request.is_finished():
                        manager.free(request)
                manager.pack({0: message}, number + 1)
            self.send(message)
            position = end
            time.sleep(0.005)
        return began

    def rows_of(self, requests: Sequence[Request], begin: int, end: int) -> RoutedExpertsLists:
        """What workers return for the positions `begin` to `end` of each request."""
        count, num_rows = len(requests), end - begin
        return RoutedExpertsLists(
            req_ids=[request.request_id for request in requests],
            num_rows=np.full(count, num_rows),
            positions=np.full(count, begin),
            rows=self.pool[: count * num_rows],
            moe_layers=tuple(range(self.pool.shape[1])),
        )


def engine(addresses: dict[str, str], shape: tuple[int, int, int], parent: Connection) -> None:
    """Run the engine's process. `shape` is that of all rows of a step together."""
    pool = np.random.default_rng(0).integers(0, EXPERTS, shape, np.uint8)
    Engine(addresses, pool, parent).serve()


def server(
    addresses: dict[str, str],
    listening: socket.socket,
    model: Path,
    max_len: int,
    parent: Connection,
) -> None:
    """The server's process: `vllm serve` with the engine elsewhere, and a probe in its loop."""
    words = [f"--model={model}", "--enable-return-routed-experts", "--routed-experts-opt-in"]
    words += [f"--max-model-len={max_len}", "--disable-uvicorn-access-log"]
    arguments = make_arg_parser(FlexibleArgumentParser()).parse_args(words)
    probe = Probe()
    threading.Thread(target=probe.answer, args=(parent,), daemon=True).start()

    async def run() -> None:
        ticking = asyncio.create_task(probe.tick())
        await run_server_worker("", listening, arguments, client_config=addresses)
        ticking.cancel()

    probe.time_callbacks()
    asyncio.run(run())
