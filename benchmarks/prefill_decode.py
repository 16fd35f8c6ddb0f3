# SPDX-License-Identifier: Apache-2.0
"""Measures what the prompt's rows cost the API servers of prefill and decode engines. No GPU.

    python -m benchmarks.prefill_decode --out benchmarks/results/prefill_decode.json

A server without an engine has vLLM's own code for the prompt's rows. A client asks it with and
without random rows of 61 layers, top-8 of 256 experts. Of the event loop: the longest callback, the
most processor time of one, and how late a timer is. Medians of rounds. For the vLLM of either line.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import json
import multiprocessing
import socket
import statistics
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks.common import table

TOKENS = (8192, 65536)
KEY = "prompt_routed_experts"
HEADS = ["Tokens", "Engine", "Carrier", "Request, MB", "Answer, MB", "It took, ms"]
HEADS += ["Longest callback, ms", "Most processor time of one, ms", "A timer late by, ms"]


def server(listening: socket.socket, parent: Connection) -> None:
    """Run the server's process."""
    import uvicorn

    from benchmarks.event_loop import Probe
    from benchmarks.prefill_decode_app import make_app

    probe = Probe()
    threading.Thread(target=probe.answer, args=(parent,), daemon=True).start()

    async def run() -> None:
        ticking = asyncio.create_task(probe.tick())
        config = uvicorn.Config(make_app(), log_level="error")
        await uvicorn.Server(config).serve([listening])
        ticking.cancel()

    probe.time_callbacks()
    asyncio.run(run())


def ask(port: int, probe: Connection, tokens: int, engine: str, params: Any) -> tuple[Any, ...]:
    """The answer, and the numbers of its line."""
    body = json.dumps({"prompt": "a", "seed": tokens, "kv_transfer_params": params}).encode()
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    began = time.monotonic()
    connection.request("POST", f"/{engine}", body, {"Content-Type": "application/json"})
    reply = connection.getresponse()
    answer = reply.read()
    ended = time.monotonic()
    connection.close()
    assert reply.status == 200, answer[:300]
    time.sleep(0.1)  # Memory is freed after the answer.
    probe.send((began, ended + 0.1))
    found = probe.recv().values()
    return json.loads(answer), [len(body) / 1e6, len(answer) / 1e6, 1e3 * (ended - began), *found]


def run_round(port: int, probe: Connection) -> list[list[Any]]:
    """Ask as clients of a prefill and of a decode engine, without and with the prompt's rows."""
    lines: list[list[Any]] = []
    for tokens in TOKENS:
        asked: Any = {"do_remote_decode": True}
        _, numbers = ask(port, probe, tokens, "prefill", {**asked, KEY: False})
        lines.append([tokens, "prefill", "no", *numbers])
        prefilled, numbers = ask(port, probe, tokens, "prefill", asked)
        lines.append([tokens, "prefill", "yes", *numbers])
        params = prefilled["kv_transfer_params"]
        answer, numbers = ask(port, probe, tokens, "decode", {**params, KEY: None})
        lines.append([tokens, "decode", "no", *numbers])
        joined, numbers = ask(port, probe, tokens, "decode", params)
        lines.append([tokens, "decode", "yes", *numbers])
        starts = [a["choices"][0]["routed_experts_start"] for a in (prefilled, answer, joined)]
        assert starts == [0, tokens - 1, 0], starts
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9, help="(%(default)s)")
    parser.add_argument("--out", type=Path, help="file for the numbers of all rounds, as JSON")
    args = parser.parse_args()
    spawn = multiprocessing.get_context("spawn")
    parent, child = spawn.Pipe()
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        port = listening.getsockname()[1]
        process = spawn.Process(target=server, args=(listening, child), daemon=True)
        process.start()
    # The first round warms up.
    rounds = [run_round(port, parent) for _ in range(args.rounds + 1)][1:]
    process.terminate()
    lines = []
    for same in zip(*rounds, strict=True):
        numbers = zip(*(line[3:] for line in same), strict=True)
        medians = [statistics.median(values) for values in numbers]
        lines.append([f"{same[0][0]:,}", *same[0][1:3], *(f"{m:,.1f}" for m in medians)])
    print(table(HEADS, lines))
    if args.out:
        args.out.write_text(json.dumps(rounds) + "\n")


if __name__ == "__main__":
    main()
