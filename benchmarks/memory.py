# SPDX-License-Identifier: Apache-2.0
"""Measures the memory that rows use: resident bytes, compared with the rows that are there.

    python -m benchmarks.memory --out benchmarks/results/v0.20.2/memory.md
    .venv-v0.33.0/bin/python -m benchmarks.memory --on v0.33.0 \
        --out benchmarks/results/v0.33.0/memory.md

It needs no GPU and no model. Each case runs in a process of its own, so that memory which an
earlier case gave back does not count.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from benchmarks.common import ROOT, Failure, command, table
from harness.lines import LINES, installed
from tools.common.pin import Project
from tools.series.series import fingerprint, read_series

LAYERS, TOP_K, BLOCK = 48, 8, 16
ROW = LAYERS * TOP_K
# The API server: the running requests, how many still run at the end, and the steps until another
# one is preempted.
RUNNING, LEFT, STEPS = 512, 150, 40

# Bytes of the rows that are there, and the resident bytes that they take.
Measured = tuple[int, int]


def resident() -> int:
    return int(psutil.Process().memory_info().rss)


def store_of_blocks() -> Measured:
    """v0.20.2: 500 blocks of rows, scattered over a KV cache of 1.6 million tokens."""
    from vllm.v1.core.routed_experts_rows import RoutedExpertsRows

    count, blocks = 500, 100_000
    rows = RoutedExpertsRows(blocks, BLOCK)
    rows.reserve(LAYERS, TOP_K, "uint8")
    row = np.ones((BLOCK, LAYERS, TOP_K), np.uint8)
    memory = rows._rows
    assert memory is not None
    before = resident()
    for block in random.Random(0).sample(range(blocks), count):
        memory[block * BLOCK : (block + 1) * BLOCK] = row
    return count * row.nbytes, resident() - before


def put_blocks(kept: int, replaced: int) -> Measured:
    """v0.33.0: blocks of rows in the store of the worker.

    Args:
        kept: how many there are at the end.
        replaced: how many others are released before, in random order.
    """
    from vllm.distributed.aux_output_connector.store import (
        BackgroundBlockObjectStore,
        BlockObject,
        BlockObjectStore,
    )

    block = np.ones((BLOCK, LAYERS, TOP_K), np.uint8)
    store = BackgroundBlockObjectStore(BlockObjectStore(), max_pending_batches=64)
    keys = [index.to_bytes(32, "big") for index in range(kept + replaced)]
    order = random.Random(0).sample(keys[:kept], min(kept, replaced))
    before = resident()
    for index, key in enumerate(keys):
        released = order[index - kept : index - kept + 1] if index >= kept else []
        store.put([BlockObject(key, block)], retain_keys=[key], release_keys=released)
    missing = store.find_missing(keys)
    assert len(missing) == replaced
    return kept * block.nbytes, resident() - before


def incomplete_blocks() -> Measured:
    """v0.33.0: 500 requests with 16 rows each in blocks of 1,056 tokens, as with Mamba."""
    from vllm.distributed.aux_output_connector.routed_experts import RoutedExpertsBuffer

    count, rows = 500, 16
    buffer = RoutedExpertsBuffer(np.dtype(np.uint8), (LAYERS, TOP_K), 1056, count, 2)
    piece = np.ones((rows, LAYERS, TOP_K), np.uint8)
    before = resident()
    for _ in range(count):
        buffer.capture(buffer.add_request(), 0, piece)
    return count * piece.nbytes, resident() - before


def preempted(take: Callable[[int, int], None]) -> Measured:
    """Steps in which ever fewer requests run. The others wait, and keep their rows.

    Args:
        take: gives the front end a step: how many requests run, and the number of the step.
    """
    running, step, rows = RUNNING, 0, 0
    before = resident()
    while running > LEFT:
        take(running, step)
        rows += running
        step += 1
        running -= step % STEPS == 0
    return rows * ROW, resident() - before


def front_end_of_processors() -> Measured:
    """v0.20.2: the API server, with 362 preempted requests."""
    from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, RoutedExpertsOutput
    from vllm.v1.engine.routed_experts_processor import RoutedExpertsProcessor, add_routed_experts

    class State:
        def __init__(self) -> None:
            self.routed_experts_processor = RoutedExpertsProcessor()

    states: dict[str, Any] = {str(i): State() for i in range(RUNNING)}

    def take(running: int, step: int) -> None:
        message = EngineCoreOutputs(
            outputs=[EngineCoreOutput(str(i), [1]) for i in range(running)],
            routed_experts=RoutedExpertsOutput(
                rows=[np.ones((running, LAYERS, TOP_K), np.uint8)],
                slices=[(i, step, i, 1) for i in range(running)],
                moe_layers=(0,),
            ),
        )
        add_routed_experts(message, states)

    return preempted(take)


def front_end_of_states() -> Measured:
    """v0.33.0: the API server, with 362 preempted requests."""
    from vllm.v1.engine import RoutedExpertsOutputs
    from vllm.v1.engine.output_processor import RequestState

    states = [RequestState.__new__(RequestState) for _ in range(RUNNING)]
    for state in states:
        state.routed_experts_chunks = []

    def take(running: int, step: int) -> None:
        rows = np.ones((running, LAYERS, TOP_K), np.uint8)
        ends = list(range(1, running + 1))
        for index, pieces in RoutedExpertsOutputs(rows, list(range(running)), ends).split():
            states[index].add_routed_experts(pieces)

    return preempted(take)


# By line and name of the case. The greatest factor that is right is 2 for a store, and 1.3 for a
# front end.
CASES: dict[str, dict[str, tuple[Callable[[], Measured], float]]] = {
    "v0.20.2": {
        "the store, 500 scattered blocks": (store_of_blocks, 2.0),
        "the API server, 362 preempted requests": (front_end_of_processors, 1.3),
    },
    "v0.33.0": {
        "the store, 500 blocks": (lambda: put_blocks(500, 0), 2.0),
        "the store, 20,000 blocks": (lambda: put_blocks(20_000, 0), 2.0),
        "the store, 20,000 blocks after 20,000 others": (lambda: put_blocks(20_000, 20_000), 2.0),
        "500 requests with 16 rows in blocks of 1,056 tokens": (incomplete_blocks, 2.0),
        "the API server, 362 preempted requests": (front_end_of_states, 1.3),
    },
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark with command-line arguments; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--out", type=Path, help="the record, Markdown")
    parser.add_argument(
        "--on", choices=LINES, default=installed(), help="line of the installed vLLM (%(default)s)"
    )
    parser.add_argument("--case", help="run this case alone in this process, and print bytes")
    args = parser.parse_args(argv)
    if args.case:
        print(json.dumps(CASES[args.on][args.case][0]()))
        return 0
    try:
        text = report(args.on, {name: measure(args.on, name) for name in CASES[args.on]})
    except Failure as e:
        print(f"error: {e}", file=sys.stderr)
        return 1
    if args.out:
        args.out.write_text(text)
    print(text)
    return 0


def measure(line: str, name: str) -> Measured:
    """A case, in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.memory", "--on", line, "--case", name],
        cwd=ROOT,
        text=True,
        capture_output=True,
        check=False,
    )
    if done.returncode:
        raise Failure(f"{name} ended with status {done.returncode}: {done.stderr.strip()[-2000:]}")
    rows, used = json.loads(done.stdout.splitlines()[-1])
    return rows, used


def digits(line: str) -> str:
    """The first digits of the fingerprint of a line's series."""
    project = Project(ROOT, line)
    return fingerprint(read_series(project.series_file), project.pin)[:16]


def report(line: str, measured: dict[str, Measured]) -> str:
    lines = [
        f"# Memory of rows on the line {line}",
        f"series: {digits(line)}",
        f"`python {' '.join(command())}`: {LAYERS} layers, top-{TOP_K}, uint8, blocks of {BLOCK} "
        f"tokens; {platform.machine()}, {os.cpu_count()} cores. Each case ran in a process of its "
        "own. Resident bytes are compared with those before the first row.",
    ]
    rows = [
        [
            name,
            f"{there / 1e6:,.1f}",
            f"{used / 1e6:,.1f}",
            f"{used / there:.2f}",
            f"{CASES[line][name][1]:.1f}",
        ]
        for name, (there, used) in measured.items()
    ]
    heads = ["What", "rows, MB", "resident, MB", "resident / rows", "at most"]
    return "\n\n".join([*lines, table(heads, rows)])


if __name__ == "__main__":
    sys.exit(main())
