# SPDX-License-Identifier: Apache-2.0
"""Measures what rows cost streams: inter-token latency over HTTP.

    python -m benchmarks.latency --out OUT --build pristine=env-pristine.sh \\
        --build patched=env-patched.sh --server pristine:off --server pristine:on \\
        --server patched:off --server patched:opt-in
    python -m benchmarks.latency --out OUT --build patched=env-patched.sh --server patched:opt-in \\
        --requests 64

Without a burst, streams decode together. On an opt-in server none of them asks for rows, one in
ten, or all. Each setting is compared with the same build without the flag, and builds without the
flag with the first of them.

With a burst (`--requests`), silent streams decode. Then a burst of requests is admitted in one step
(the server is paused while they come in), decodes beside the streams, and ends in one step. If the
requests ask, each answer has the rows of its whole sequence. Their prompts are in the prefix cache,
with rows, so a burst takes seconds. Rounds alternate between bursts that ask and bursts that do
not. Two processes read the streams and the burst.

All servers run at once and take turns within rounds. Times between two chunks are compared within
rounds. Records are appended to OUT/latency.jsonl; the report is OUT/latency.md and latency.json.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import multiprocessing.connection
import platform
import signal
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil

from benchmarks.builds import Process, Variant, read_builds, read_variants
from benchmarks.bursts import GENERATE, body_of, serve_bursts
from benchmarks.common import WORK, Failure, Gpu, Records, command, end_orderly, tell
from benchmarks.latency_report import ALONE, PHASES, SKIPPED, phases_of, quantiles, write_report
from benchmarks.loads import SHARES, Load
from harness.process import free_port
from harness.shapes import MODELS, model_config, write_model

# Seconds for which the server is paused while the burst comes in, and streams run on after it.
COME_IN_S, AFTER_S = 1.0, 0.3


class Server:
    """One server of a variant."""

    def __init__(self, variant: Variant, arguments: argparse.Namespace, model: Path) -> None:
        self.variant = variant
        self.burst = bool(arguments.requests)
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        words = ["-m", "vllm.entrypoints.cli.main", "serve", str(model), "--load-format=dummy"]
        words += ["--skip-tokenizer-init", "--host=127.0.0.1", f"--port={port}"]
        words += [f"--max-model-len={max(4096, arguments.prompt + arguments.output + 16)}"]
        words += [f"--max-num-seqs={arguments.requests + arguments.streams}"]
        words += [f"--kv-cache-memory-bytes={int(arguments.kv_gib * 2**30)}"]
        words += ["--disable-uvicorn-access-log", "--gpu-memory-utilization=0.1"]
        env = {
            "VLLM_CACHE_ROOT": str(WORK / "cache" / variant.build.name),
            # Needed for /pause.
            "VLLM_SERVER_DEV_MODE": "1",
        }
        if arguments.model == "tiny":
            words += ["--enforce-eager", "--block-size=32", "--max-num-batched-tokens=2048"]
            env["TORCH_COMPILE_DISABLE"] = "1"
        else:
            sizes = [1, 2, 4, 8, 16, 32, 64, 80, 96, 128]
            config = json.dumps({"cudagraph_capture_sizes": sizes})
            words += ["--max-num-batched-tokens=8192", f"--compilation-config={config}"]
        words += [f"--{name.replace('_', '-')}" for name, on in variant.options.items() if on]
        log = WORK / "logs" / f"server-{variant.name.replace(' ', '-').replace('#', '')}.log"
        self.process = Process(variant.build, words, log, env)

    def wait(self, ends: float) -> None:
        """Return when it is ready. Raises Failure if it ends, or is not ready in time."""
        while True:
            if self.process.poll() is not None:
                raise Failure(f"{self.variant.name} ended:\n{self.process.tail(40)}")
            if time.monotonic() > ends:
                raise Failure(f"{self.variant.name} is not ready:\n{self.process.tail(40)}")
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(self.url + "/health", timeout=2).status_code == 200:
                    return
            time.sleep(0.2)

    @property
    def modes(self) -> list[str]:
        """Which of its streams, or of the requests of a burst, ask."""
        if self.variant.flag != "opt-in":
            return [self.variant.flag]
        return ["silent", "all"] if self.burst else list(SHARES)


async def read_stream(
    client: httpx.AsyncClient, body: dict[str, Any], arrivals: list[float]
) -> tuple[int, bool]:
    """Read a stream to its end. Adds the time of each chunk to `arrivals`; returns the bytes, and
    whether there were rows. Raises Failure if the server refuses it."""
    size, rows = 0, False
    async with client.stream("POST", GENERATE, json=body) as answer:
        if answer.status_code != 200:
            raise Failure(f"a stream got {answer.status_code}: {await answer.aread()!r}")
        async for part in answer.aiter_raw():
            # A late reader gets several events at once.
            arrivals += [time.perf_counter()] * part.count(b"data: {")
            size += len(part)
            rows |= b'"routed_experts":"' in part
    return size, rows


class Bench:
    """The rounds of one start."""

    def __init__(
        self,
        arguments: argparse.Namespace,
        pipe: multiprocessing.connection.Connection,
        deadline: float,
    ) -> None:
        self.arguments = arguments
        self.pipe = pipe
        self.deadline = deadline
        self.vocab = model_config(arguments.model)["vocab_size"]
        rng = np.random.default_rng(5)
        shape = (arguments.requests, arguments.prompt)
        self.prompts = rng.integers(10, self.vocab - 10, shape).tolist()

    def left(self) -> float:
        """Seconds until the deadline, at least five."""
        return max(5.0, self.deadline - time.monotonic())

    def burst(self, server: Server, asks: bool | None, output: int) -> None:
        """Tell the other process to send the burst."""
        bodies = [body_of(prompt, output, asks, stream=False) for prompt in self.prompts]
        self.pipe.send((server.url, bodies, self.left()))

    async def burst_result(self) -> dict[str, Any]:
        """The result of the burst. Raises Failure if it failed or takes too long."""
        ends = time.monotonic() + self.left()
        while not self.pipe.poll():
            if time.monotonic() > ends:
                raise Failure("the burst was not answered in time")
            await asyncio.sleep(0.005)
        told = self.pipe.recv()
        if "error" in told:
            raise Failure(told["error"])
        return told

    async def warm_up(self, server: Server) -> None:
        """Put the burst's prompts into the prefix cache, with rows where the server has any."""
        self.burst(server, True if server.variant.flag == "opt-in" else None, 1)
        await self.burst_result()

    async def streams(self, server: Server, mode: str) -> dict[str, Any]:
        """Run streams without a burst. Times are in milliseconds."""
        count, output = self.arguments.streams, self.arguments.output
        prompts = np.random.default_rng(6).integers(10, self.vocab - 10, (count, 16)).tolist()
        asks = Load(count, 16, output).asks(mode)
        limits = httpx.Limits(max_connections=count)
        async with httpx.AsyncClient(
            base_url=server.url, limits=limits, timeout=self.left()
        ) as client:

            async def stream(prompt: list[int], ask: bool | None) -> tuple[list[float], int]:
                arrivals: list[float] = []
                body = body_of(prompt, output, ask, stream=True)
                size, rows = await read_stream(client, body, arrivals)
                # A server that is behind puts the tokens of several steps into one chunk.
                if len(arrivals) < SKIPPED + 2:
                    raise Failure(f"a stream got {len(arrivals)} chunks")
                if ask is not None and ask != rows:
                    raise Failure(f"a stream that {'asked' if ask else 'did not ask'}: {rows=}")
                return arrivals, size

            told = await asyncio.gather(*map(stream, prompts, asks))
        gaps = [np.diff(arrivals)[SKIPPED:output].tolist() for arrivals, _ in told]
        return {
            "gaps_ms": {"alone": [round(1e3 * gap, 3) for own in gaps for gap in own]},
            "answers_mb": round(sum(size for _, size in told) / 1e6, 3),
        }

    async def turn(self, server: Server, mode: str) -> dict[str, Any]:
        """Run one burst beside the streams. Times are in milliseconds, by phase."""
        arguments = self.arguments
        asks = False if server.variant.flag == "opt-in" else None
        rng = np.random.default_rng(6)
        arrivals: list[list[float]] = [[] for _ in range(arguments.streams)]
        limits = httpx.Limits(max_connections=arguments.streams + 2)
        async with httpx.AsyncClient(base_url=server.url, limits=limits, timeout=60) as client:
            prompts = rng.integers(10, self.vocab - 10, (arguments.streams, 16)).tolist()
            bodies = [body_of(prompt, 4000, asks, stream=True) for prompt in prompts]
            tasks = [
                asyncio.create_task(read_stream(client, body, own))
                for body, own in zip(bodies, arrivals, strict=True)
            ]

            async def sleep(seconds: float) -> None:
                if self.deadline < time.monotonic():
                    raise Failure("time is up in a round")
                await asyncio.sleep(seconds)
                for task in tasks:
                    if task.done():
                        raise task.exception() or Failure("a stream ended too early")

            try:
                while min(map(len, arrivals)) < SKIPPED + ALONE:
                    await sleep(0.01)
                params = {"mode": "keep", "clear_cache": "false"}
                (await client.post("/pause", params=params)).raise_for_status()
                self.burst(server, {"silent": False, "all": True}.get(mode), arguments.output)
                await sleep(COME_IN_S)
                resumed = time.perf_counter()
                (await client.post("/resume")).raise_for_status()
                burst = await self.burst_result()
                await sleep(AFTER_S)
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
        if mode == "all" and burst["rows"] != arguments.prompt + arguments.output - 1:
            raise Failure(f"an answer has {burst['rows']} rows")
        gaps: dict[str, list[float]] = {phase: [] for phase in PHASES}
        for own in arrivals:
            for phase, found in phases_of(own, resumed, burst["done"], arguments.output).items():
                gaps[phase] += [round(1e3 * gap, 3) for gap in found]
        return {
            "gaps_ms": gaps,
            "answers_mb": round(burst["bytes"] / 1e6, 3),
            "ended_within_ms": round(1e3 * (burst["last_first"] - burst["first"]), 1),
            "burst_ms": round(1e3 * (burst["done"] - resumed), 1),
        }


def read_arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for records and report")
    parser.add_argument(
        "--build", action="append", metavar="NAME=PLACE", help="as in benchmarks.overhead"
    )
    parser.add_argument("--server", action="append", metavar="BUILD:FLAG", help="a server; repeat")
    parser.add_argument(
        "--model", choices=MODELS, default="qwen3-30b-a3b" if Gpu().there else "tiny", help="shape"
    )
    parser.add_argument("--layers", type=int, help="only so many layers")
    parser.add_argument("--kv-gib", type=float, default=32.0, help="KV cache of a server, GiB")
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--requests", type=int, default=0, help="of the burst; 0: there is none")
    parser.add_argument("--prompt", type=int, default=3936, help="tokens in of each of them")
    parser.add_argument(
        "--output", type=int, default=64, help="tokens out of each of them, or of each stream"
    )
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--minutes", type=float, default=8.5, help="time for everything")
    parser.add_argument(
        "--together", action="store_true", help="start servers at once instead of in turn"
    )
    parser.add_argument(
        "--report-only", action="store_true", help="rebuild the report, run nothing"
    )
    arguments = parser.parse_args(words)
    arguments.build = arguments.build or ["patched="]
    arguments.server = arguments.server or ["patched:opt-in"]
    try:
        read_variants(arguments.server, read_builds(arguments.build))
    except ValueError as error:
        parser.error(str(error))
    return arguments


def main() -> int:
    began = time.monotonic()
    arguments = read_arguments()
    deadline = began + 60 * arguments.minutes - 12.0
    arguments.out.mkdir(parents=True, exist_ok=True)
    records = Records(arguments.out / "latency.jsonl")
    if arguments.report_only:
        write_report(records, arguments.out)
        return 0
    signal.signal(signal.SIGTERM, end_orderly)
    try:
        with contextlib.ExitStack() as stack:
            run(arguments, records, deadline, stack)
    except (Failure, httpx.HTTPError) as failure:
        tell(f"FAILED: {type(failure).__name__}: {failure}")
        return 1
    except KeyboardInterrupt:
        tell("stopped by a signal; run the same command to continue")
        return 130
    return 0


def run(
    arguments: argparse.Namespace, records: Records, deadline: float, stack: contextlib.ExitStack
) -> None:
    """Start the servers on the stack and run rounds until there are enough or time is up."""
    config = model_config(arguments.model, arguments.layers)
    records.begin(
        {
            "model": arguments.model,
            "layers": config["num_hidden_layers"],
            "device": Gpu().name or "CPU",
            **{k: getattr(arguments, k) for k in ("streams", "requests", "prompt", "output")},
        }
    )
    stack.callback(write_report, records, arguments.out)
    pipe, theirs = multiprocessing.get_context("spawn").Pipe()
    sender = multiprocessing.get_context("spawn").Process(
        target=serve_bursts, args=(theirs,), daemon=True
    )
    sender.start()
    theirs.close()
    stack.callback(sender.terminate)
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    model = write_model(folder / "model", arguments.model, arguments.layers)
    servers = []
    for variant in read_variants(arguments.server, read_builds(arguments.build)):
        servers.append(Server(variant, arguments, model))
        stack.enter_context(servers[-1].process)
        if not arguments.together:
            servers[-1].wait(deadline)
    for server in servers:
        server.wait(deadline)
        tell(f"{server.variant.name} is ready")
    bench = Bench(arguments, pipe, deadline)
    number = len(records.of("start")) + 1
    versions = [httpx.get(s.url + "/version", timeout=10).json()["version"] for s in servers]
    records.add(
        {
            "kind": "start",
            "start": number,
            "command": command(),
            "versions": [f"{s.variant.name} {v}" for s, v in zip(servers, versions, strict=True)],
            "cores": psutil.cpu_count(),
            "machine": f"{platform.machine()}, {psutil.virtual_memory().total / 2**30:.0f} GiB",
        }
    )
    if arguments.requests:
        for server in servers:
            asyncio.run(bench.warm_up(server))
        tell("prompts are cached")
    cost = 0.0
    last = max((turn["round"] for turn in records.of("turn")), default=0)
    # The first round warms up and is not recorded.
    for round_number in range(last, arguments.rounds + 1):
        if cost * 1.1 > deadline - time.monotonic():
            tell("time is up")
            break
        began = time.monotonic()
        turns = [(server, mode) for server in servers for mode in server.modes]
        for server, mode in turns[::-1] if round_number % 2 else turns:
            if arguments.requests:
                told = asyncio.run(bench.turn(server, mode))
                when = "ended"
            else:
                told = asyncio.run(bench.streams(server, mode))
                when = "alone"
            seen = quantiles(told["gaps_ms"][when] or [0.0])
            tell(
                f"{round_number} {server.variant.name}, {mode}: {told['answers_mb']:.1f} MB, "
                f"{when}: p50 {seen['p50']:.1f}, p99 {seen['p99']:.1f}, greatest "
                f"{seen['max']:.1f} ms"
            )
            if round_number > last:
                records.add(
                    {
                        "kind": "turn",
                        "start": number,
                        "round": round_number,
                        "server": server.variant.name,
                        "mode": mode,
                        **told,
                    }
                )
        cost = time.monotonic() - began


if __name__ == "__main__":
    raise SystemExit(main())
