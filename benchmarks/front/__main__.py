# SPDX-License-Identifier: Apache-2.0
"""Measures how long rows keep the API server's event loop busy. Needs no GPU.

    .venv-v0.33.0/bin/python -m benchmarks.front --out FILE

The server is vLLM's own (FastAPI, uvicorn, AsyncLLM, output processor) in its own process. A stub
of the engine in another process sends it tokens and random rows through the engine's sockets.
Clients run in this process and connect over loopback. Loads: one answer of 128,000 tokens, whole or
streamed, and 64 streams whose readers read nothing until the engine has finished. In each round,
every load runs once with silent requests and once with asking ones.

Measured from the first output of the engine until all answers are read:

- the longest callback of the event loop, and the largest processor time of one callback. The target
  is for the longest: asking requests may add 5 ms to silent ones in the same round, median of the
  rounds;
- how late a task wakes that sleeps for a millisecond again and again. This counts several callbacks
  in a row, and everything else that runs on the machine.

The loop is asyncio's: callbacks of uvloop, which `vllm serve` uses, cannot be timed.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import importlib.metadata
import json
import multiprocessing
import os
import platform
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import httpx

from benchmarks.common import Failure, command, table
from benchmarks.front import run_engine, run_server
from benchmarks.front.loads import TOP_K, Load, loads_of
from examples.client import decode_rows
from harness.checkpoint import make_checkpoint
from harness.paired import ENOUGH_PAIRS
from harness.process import QUIET

MAX_LEN = 200_000
# The limit for what asking adds.
TARGET_MS = 5.0
# Waiting for longer than this is an error.
PATIENCE_S = 120.0
MEASURES = {
    "callback": "Longest callback",
    "processor": "Most processor time of one",
    "late": "A timer late by",
}
# Milliseconds by load, then "silent" or "asking", then measure.
Round = dict[str, dict[str, dict[str, float]]]


def send_request(port: int, load: Load, asks: bool) -> http.client.HTTPConnection:
    connection = http.client.HTTPConnection("127.0.0.1", port)
    connection.sock = socket.socket()
    if load.stalled:
        # A small buffer: the kernel must not read for a stalled reader.
        connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 14)
    connection.sock.settimeout(PATIENCE_S)
    connection.sock.connect(("127.0.0.1", port))
    connection.request("POST", load.path, load.body(asks), {"Content-Type": "application/json"})
    return connection


def read_answer(connection: http.client.HTTPConnection) -> bytes:
    with contextlib.closing(connection):
        answer = connection.getresponse()
        content = answer.read()
    if answer.status != 200:
        raise Failure(f"an answer has status {answer.status}: {content[:300]!r}")
    return content


def check(answer: bytes, load: Load, asks: bool) -> None:
    """Check the rows of an answer. Raises Failure if they are wrong."""
    events = answer.removesuffix(b"\n\ndata: [DONE]\n\n").split(b"\n\n")
    texts = [
        choice["routed_experts"]
        for event in events
        for choice in json.loads(event.removeprefix(b"data: "))["choices"]
        if choice.get("routed_experts")
    ]
    rows = sum(len(decode_rows(text)) for text in texts)
    if rows != (load.prompt + load.output - 1 if asks else 0):
        raise Failure(f"{load.name}: an answer has {rows} rows, {asks=}")
    if asks and load.stalled and len(events) > load.steps / 2:
        raise Failure(f"{load.name}: of {load.steps} steps, {len(events)} were read: none stalled")


class Bench:
    """The server and engine processes, and the pipes to them."""

    def __init__(self, arguments: argparse.Namespace, loads: Sequence[Load], folder: Path) -> None:
        model = make_checkpoint(folder / "model", max_position_embeddings=MAX_LEN)
        addresses = {f"{way}_address": f"ipc://{folder}/{way}" for way in ("input", "output")}
        rows = max(load.requests * (load.prompt + load.tokens) for load in loads)
        spawn = multiprocessing.get_context("spawn")
        self.engine, engine_end = spawn.Pipe()
        self.server, server_end = spawn.Pipe()
        with socket.socket() as listening:
            listening.bind(("127.0.0.1", 0))
            self.port = listening.getsockname()[1]
            of_engine = (addresses, (rows, arguments.layers, TOP_K), engine_end)
            of_server = (addresses, listening, model, MAX_LEN, server_end)
            self.processes = [
                spawn.Process(target=run_engine, args=of_engine, daemon=True),
                spawn.Process(target=run_server, args=of_server, daemon=True),
            ]
            for process in self.processes:
                process.start()
        engine_end.close()
        server_end.close()

    def __enter__(self) -> Bench:
        while all(p.is_alive() for p in self.processes):
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(f"http://127.0.0.1:{self.port}/health", trust_env=False).is_success:
                    return self
            time.sleep(0.2)
        self.__exit__()
        raise Failure("the engine or the server ended before it was ready")

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            process.terminate()
        for process in self.processes:
            process.join(10)
            if process.is_alive():
                process.kill()

    def run(self, load: Load, asks: bool, checked: bool) -> dict[str, float]:
        """Run a load. Returns the probe's milliseconds, the size of the answers in megabytes, and
        their duration in milliseconds."""
        self.engine.send((load, asks))
        connections = [send_request(self.port, load, asks) for _ in range(load.requests)]
        began = receive(self.engine) if load.stalled else None
        with ThreadPoolExecutor(load.requests) as readers:
            answers = list(readers.map(read_answer, connections))
        ended = time.monotonic()
        began = began or receive(self.engine)
        for answer in answers if checked else ():
            check(answer, load, asks)
        self.server.send((began, ended))
        weight = sum(map(len, answers)) / 1e6
        return {**receive(self.server), "answers_mb": weight, "took": 1e3 * (ended - began)}


def receive(process: Connection) -> Any:
    if not process.poll(PATIENCE_S):
        raise Failure("a process does not answer")
    return process.recv()


def run_rounds(arguments: argparse.Namespace) -> list[Round]:
    loads = loads_of(arguments)
    rounds: list[Round] = []
    with tempfile.TemporaryDirectory() as folder, Bench(arguments, loads, Path(folder)) as bench:
        # The first round warms up and checks the answers; it does not count.
        for number in range(arguments.rounds + 1):
            rounds.append({})
            for load in loads:
                order = [("silent", False), ("asking", True)]
                found = {
                    who: bench.run(load, asks, checked=number == 0)
                    for who, asks in order[:: 1 if number % 2 else -1]
                }
                rounds[-1][load.name] = found
                told = [
                    f"{who} " + ", ".join(f"{name} {own[name]:.1f}" for name in MEASURES)
                    for who, own in found.items()
                ]
                print(f"{number} {load.name}: {'; '.join(told)}", flush=True)
    return rounds[1:]


def summarize(rounds: Sequence[Round]) -> dict[str, dict[str, tuple[float, float, float]]]:
    """By load and measure, medians over the rounds: silent requests, asking requests, and their
    difference within a round."""
    found: dict[str, dict[str, tuple[float, float, float]]] = {}
    for load in rounds[0]:
        pairs = [(r[load]["silent"], r[load]["asking"]) for r in rounds]
        found[load] = {
            name: (
                statistics.median(silent[name] for silent, _ in pairs),
                statistics.median(asking[name] for _, asking in pairs),
                statistics.median(asking[name] - silent[name] for silent, asking in pairs),
            )
            for name in pairs[0][0]
        }
    return found


def report_text(rounds: Sequence[Round], arguments: argparse.Namespace) -> str:
    """The record in Markdown."""
    vllm, python = importlib.metadata.version("vllm"), platform.python_version()
    lines = [
        "# The server's event loop beside rows\n",
        f"`python {' '.join(command())}`: {arguments.layers} layers, "
        f"top-{TOP_K}, uint8; {len(rounds)} rounds; {os.cpu_count()} cores; vllm "
        f"{vllm}, Python {python}. Medians of the rounds: silent, asking, and by how much asking "
        f"is more in the same round. Target: at most {TARGET_MS:.0f} ms more.\n",
    ]
    enough = len(rounds) >= ENOUGH_PAIRS
    if not enough:
        lines.append(f"Too few rounds to conclude anything: it takes {ENOUGH_PAIRS}.\n")
    rows = []
    for load, row in summarize(rounds).items():
        verdict = "met" if row["callback"][2] <= TARGET_MS else "missed"
        cells = ["{:.1f}, {:.1f}, **{:+.1f}**".format(*row[name]) for name in MEASURES]
        cells.append(verdict if enough else "too few rounds")
        cells.append("{:.1f}, {:.1f}".format(*row["answers_mb"]))
        rows.append([load, *cells, "{:,.0f}, {:,.0f}".format(*row["took"])])
    heads = [f"{measure}, ms" for measure in MEASURES.values()]
    return "\n".join(
        [*lines, table(["Load", *heads, "Target", "Answers, MB", "They took, ms"], rows)]
    )


def read_arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="file for the record, as Markdown")
    parser.add_argument("--rounds", type=int, default=ENOUGH_PAIRS)
    parser.add_argument("--layers", type=int, default=61)
    parser.add_argument("--prompt", type=int, default=112_000, help="rows with the first tokens")
    parser.add_argument("--steps", type=int, default=125, help="of the engine, 128 tokens each")
    parser.add_argument("--readers", type=int, default=64, help="that stall")
    return parser.parse_args(words)


def main() -> int:
    arguments = read_arguments()
    os.environ.update(QUIET, VLLM_LOGGING_LEVEL="ERROR", VLLM_ALLOW_LONG_MAX_MODEL_LEN="1")
    try:
        rounds = run_rounds(arguments)
    except (Failure, OSError, http.client.HTTPException) as failure:
        print(f"FAILED: {type(failure).__name__}: {failure}", file=sys.stderr)
        return 1
    text = report_text(rounds, arguments)
    print(text)
    if arguments.out:
        arguments.out.write_text(text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
