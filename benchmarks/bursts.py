# SPDX-License-Identifier: Apache-2.0
"""The process of `latency.py` that sends bursts of requests and reads their answers."""

from __future__ import annotations

import asyncio
import contextlib
import json
import multiprocessing.connection
import signal
import time
from collections.abc import Sequence
from typing import Any

import httpx

from benchmarks.common import Failure
from harness.server import decode_rows

GENERATE = "/inference/v1/generate"


def body_of(prompt: Sequence[int], output: int, asks: bool | None, stream: bool) -> dict[str, Any]:
    """A request of `/inference/v1/generate`."""
    params: dict[str, Any] = {"temperature": 0.0, "max_tokens": output, "ignore_eos": True}
    if asks is not None:
        params["extra_args"] = {"return_routed_experts": asks}
    return {"token_ids": list(prompt), "sampling_params": params, "stream": stream}


async def send_burst(url: str, bodies: list[dict[str, Any]], timeout_s: float) -> dict[str, Any]:
    """Send all requests at once and read all answers. Returns sizes and times."""
    limits = httpx.Limits(max_connections=len(bodies))
    async with httpx.AsyncClient(base_url=url, limits=limits, timeout=timeout_s) as client:
        first: list[float] = []
        last: list[float] = []

        async def one(body: dict[str, Any]) -> bytes:
            parts = []
            async with client.stream("POST", GENERATE, json=body) as answer:
                first.append(time.perf_counter())
                async for part in answer.aiter_raw():
                    parts.append(part)
                last.append(time.perf_counter())
            content = b"".join(parts)
            if answer.status_code != 200:
                raise Failure(f"the burst got {answer.status_code}: {content[:300]!r}")
            return content

        answers = await asyncio.gather(*(one(body) for body in bodies))
    rows = json.loads(answers[-1])["choices"][0].get("routed_experts")
    return {
        "bytes": sum(map(len, answers)),
        "rows": 0 if rows is None else len(decode_rows(rows)),
        "first": min(first),
        "last_first": max(first),
        "done": max(last),
    }


def serve_bursts(pipe: multiprocessing.connection.Connection) -> None:
    """Run the second process: send each burst that the pipe asks for."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with contextlib.suppress(EOFError):
        while True:
            url, bodies, timeout_s = pipe.recv()
            try:
                pipe.send(asyncio.run(send_burst(url, bodies, timeout_s)))
            except Exception as error:
                pipe.send({"error": f"{type(error).__name__}: {error}"})
