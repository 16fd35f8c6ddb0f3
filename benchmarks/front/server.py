# SPDX-License-Identifier: Apache-2.0
"""The processes: the server, with a probe in its event loop, and a stub of the engine."""

from __future__ import annotations

import asyncio
import dataclasses
import socket
import threading
import time
import typing
from collections.abc import Sequence
from dataclasses import MISSING
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec
import numpy as np
import zmq
from vllm.entrypoints.cli.serve import make_arg_parser
from vllm.entrypoints.openai.api_server import run_server_worker
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1 import engine as messages
from vllm.v1.engine import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreReadyResponse,
    EngineCoreRequest,
    EngineCoreRequestType,
    FinishReason,
    UtilityOutput,
)
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder, UtilityResult

from benchmarks.front.loads import Load
from benchmarks.front.probe import Probe
from harness.lines import LINES, installed

EXPERTS = 256


def add_rows(message: EngineCoreOutputs, rows: np.ndarray, begin: int) -> None:
    """Put the rows of all outputs into a message as the engine does: for each output equally many,
    from position `begin` on."""
    count, outputs = len(rows) // len(message.outputs), len(message.outputs)
    if hasattr(messages, "OutputRoutedExperts"):  # v0.33.0
        ends = [count * (index + 1) for index in range(outputs)]
        packed = messages.RoutedExpertsOutputs(rows, list(range(outputs)), ends)
        message.outputs[0].routed_experts = messages.OutputRoutedExperts([], packed)
        return
    arrays = [rows]
    pieces = [(index, begin, index * count, count) for index in range(outputs)]
    if rows[:count].nbytes >= messages.LARGE_ROWS:
        most = messages.MAX_ROWS_ARRAY // rows[0].nbytes
        arrays = [rows[:0]]
        pieces = []
        for offset in range(0, len(rows), count):
            for start in range(0, count, most):
                size = min(most, count - start)
                arrays.append(rows[offset + start : offset + start + size])
                pieces.append((offset // count, begin + start, offset + start, size))
    layers = tuple(range(rows.shape[1]))
    message.routed_experts = messages.RoutedExpertsOutput(arrays, pieces, layers)


def ready() -> EngineCoreReadyResponse:
    """What an engine says when it has started. Its sizes change none of the server's settings."""
    hints = typing.get_type_hints(EngineCoreReadyResponse)
    known = {"max_model_len": 10**9, "block_size": 16, "dtype": "float32"}
    samples = {int: 1, str: "", bool: False}
    needed = [f.name for f in dataclasses.fields(EngineCoreReadyResponse) if f.default is MISSING]
    return EngineCoreReadyResponse(**{n: known.get(n, samples.get(hints[n])) for n in needed})


class Engine:
    """The stub of the engine."""

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
        self.requests.send(msgspec.msgpack.encode(ready()))

    def serve(self) -> None:
        """Run the loads that the parent announces, until the parent ends."""
        decode_request, decode = MsgpackDecoder(EngineCoreRequest), MsgpackDecoder()
        told: list[tuple[Load, bool]] = []
        waiting: list[str] = []
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
                    waiting.append(decode_request.decode(frames).request_id)
                elif kind == EngineCoreRequestType.UTILITY:
                    _, call, method, _ = decode.decode(frames)
                    result = ("generate",) if method == "get_supported_tasks" else None
                    output = UtilityOutput(call, result=UtilityResult(result))
                    self.send(EngineCoreOutputs(utility_output=output))
            if told and len(waiting) == told[0][0].requests:
                # Taking requests in is not measured.
                time.sleep(0.1)
                self.parent.send(self.answer(*told.pop(), waiting))
                waiting.clear()

    def send(self, message: EngineCoreOutputs) -> None:
        self.outputs.send_multipart(self.encoder.encode(message), copy=False)

    def answer(self, load: Load, asks: bool, request_ids: Sequence[str]) -> float:
        """Send all outputs of the requests. Returns the time at which this began."""
        position = 0
        began = time.monotonic()
        for number in range(load.steps):
            reason = FinishReason.LENGTH if number == load.steps - 1 else None
            outputs = [
                EngineCoreOutput(request_id, [7] * load.tokens, finish_reason=reason)
                for request_id in request_ids
            ]
            message = EngineCoreOutputs(outputs=outputs)
            end = load.prompt + (number + 1) * load.tokens - 1
            if asks:
                add_rows(message, self.pool[: len(outputs) * (end - position)], position)
            self.send(message)
            position = end
            time.sleep(0.005)
        return began


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
    words += LINES[installed()].arguments
    arguments = make_arg_parser(FlexibleArgumentParser()).parse_args(words)
    probe = Probe()
    threading.Thread(target=probe.answer, args=(parent,), daemon=True).start()

    async def run() -> None:
        ticking = asyncio.create_task(probe.tick())
        await run_server_worker("", listening, arguments, client_config=addresses)
        ticking.cancel()

    probe.time_callbacks()
    asyncio.run(run())
