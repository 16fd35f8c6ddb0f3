# SPDX-License-Identifier: Apache-2.0
"""Measures what rows cost the host, in each process: scheduler, worker, way to the front end.

    python -m benchmarks.host --out benchmarks/results/host-cpu.md

It needs no GPU. vLLM's own scheduler, message encoding, socket and output processor run with
generated tokens and random rows in the shape of DeepSeek-V3: 61 layers, top-8, one byte per id.
Engines take turns, step by step: in one the flag is off, in one nobody asks, in others one request
or all ask. So the difference at the same step is what rows cost. As in vLLM, each front end is a
separate process that receives messages through a socket. Times are processor time of the thread, so
that a busy machine matters little. Of the worker, `RoutedExpertsCapturer.take_rows()` is measured,
with its buffer on the CPU. A profile of scheduler and front end, each engine alone, says where the
time goes.

vLLM without the series runs beside it if it is there: `make bench` builds it.
"""

from __future__ import annotations

import argparse
import contextlib
import cProfile
import dataclasses
import gc
import itertools
import json
import platform
import pstats
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
import vllm
from vllm.model_executor.layers.fused_moe import routed_experts_pipeline
from vllm.model_executor.layers.fused_moe.routed_experts_capturer import RoutedExpertsCapturer
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.engine.output_processor import OutputProcessor
from vllm.v1.serial_utils import MsgpackDecoder

from benchmarks.builds import ROOT, Build, Variant
from benchmarks.common import command, tell
from benchmarks.host_engine import (
    BLOCK,
    EXPERTS,
    LAYERS,
    PROCESSES,
    TOP_K,
    Core,
    Engine,
    Load,
    RemoteEngine,
    make_requests,
    peak_memory,
)
from benchmarks.host_report import (
    KINDS,
    LABELS,
    budget_text,
    groups_text,
    parts_text,
    profile_text,
)
from harness.paired import ENOUGH_PAIRS, compare

PRISTINE = ROOT / "build/v0.20.2/pristine/site"
# Each load with the kinds of engines that take turns, each compared with the one before it. Two of
# one kind show how much engines differ that do the same.
DECODE: dict[Load, tuple[str, ...]] = {
    Load("decode", requests=1024, prompt=64, output=256): ("silent", "all"),
    Load("drafts", requests=512, prompt=64, output=800, drafts=4): ("silent", "all"),
    Load("one asks", requests=1024, prompt=64, output=512): ("off", "silent", "silent", "one"),
    Load("few", requests=8, prompt=64, output=8192, front_end=False): ("off", "silent"),
    Load("finish at once", requests=64, prompt=3_000, output=1_000): ("silent", "all"),
}
BUILDS = Load("builds", requests=1024, prompt=64, output=256)
GROUPS = [
    Load(f"group of {n}", requests=10 * n, prompt=8192, output=16, at_once=n, group=n)
    for n in (64, 256)
]
# What is profiled: files that the series adds, in engines that run alone.
PROFILED = {"one asks": "one", "decode": "all", "drafts": "all"}
ADDED_FILES = ("routed_experts",)


def take_turns(load: Load, engines: Sequence[Engine | RemoteEngine]) -> None:
    """Start the engines and run the load in all of them, step by step."""
    tell(f"{load.name}: {load}")
    rng = np.random.default_rng(0)
    with contextlib.ExitStack() as stack:
        for engine in engines:
            stack.enter_context(engine)
        gc.collect()
        gc.disable()
        # A random order, so that a slow moment and the processor's cache affect all alike.
        going = True
        while going:
            stepped = [engines[i].step() for i in rng.permutation(len(engines))]
            going = all(stepped)
        gc.enable()


def average_more(base: np.ndarray, other: np.ndarray) -> list[float] | None:
    """By how much `other` exceeds `base` on average over rounds of one block, in which every
    request fills a block: the estimate and both ends of its 95 % interval, None if there are too
    few rounds."""
    rounds = [
        values[: len(values) // BLOCK * BLOCK].reshape(-1, BLOCK).mean(1)
        for values in (base, other)
    ]
    if len(rounds[0]) < ENOUGH_PAIRS:
        return None
    more = compare(*(values.tolist() for values in reversed(rounds)))
    percents = np.array([more.percent, more.low, more.high], dtype=float)
    return (np.median(rounds[0]) * percents / 100).tolist()


def compare_steps(
    load: Load, base: list[dict[str, float]], other: list[dict[str, float]]
) -> dict[str, Any]:
    """Milliseconds per decode step in two engines, by part and by way."""
    shapes = [
        [(int(step["requests"]), int(step["tokens"])) for step in steps] for steps in (base, other)
    ]
    assert shapes[0] == shapes[1], f"{load.name}: the engines scheduled different steps"
    # The last step finishes all requests that are left.
    decode = [i for i, shape in enumerate(shapes[0][:-1]) if load.is_decode(*shape)]
    record: dict[str, Any] = {"steps": len(decode)}
    for label, parts in LABELS.items():
        if not set(parts) <= base[0].keys():
            continue
        first, second = (
            np.array([sum(step[part] for part in parts) for step in steps])
            for steps in (base, other)
        )
        record[label] = {
            "base": float(np.median(first[decode])),
            "other": float(np.median(second[decode])),
            "more": float(np.median((second - first)[decode])),
            "average": average_more(first[decode], second[decode]),
            "p99": [float(np.percentile(ms[decode], 99)) for ms in (first, second)],
            "last": [float(ms[-1]) for ms in (first, second)],
        }
    return record


def measure_decode(load: Load, kinds: Sequence[str]) -> list[dict[str, Any]]:
    """Every kind of engine, compared with the one before it."""
    engines = [Engine(load, kind) for kind in kinds]
    take_turns(load, engines)
    return [
        {
            "load": load.name,
            "what": str(load),
            "kind": other.kind,
            "base": base.kind,
            **compare_steps(load, base.steps, other.steps),
        }
        for base, other in itertools.pairwise(engines)
    ]


def measure_builds(load: Load) -> list[dict[str, Any]]:
    """The patched build with its flag off, compared with pristine vLLM and with itself."""
    patched = Build("patched")
    variants = [
        Variant(patched, "off"),
        Variant(Build("pristine", str(PRISTINE)), "off"),
        Variant(patched, "off", copy=2),
    ]
    engines = [RemoteEngine(variant, load) for variant in variants]
    take_turns(load, engines)
    return [
        {
            "load": load.name,
            "what": str(load),
            "kind": variants[0].name,
            "base": variant.name,
            **compare_steps(load, engine.steps, engines[0].steps),
        }
        for variant, engine in list(zip(variants, engines, strict=True))[1:]
    ]


def measure_group(load: Load) -> dict[str, Any]:
    """Groups, one after the other, each with a prompt of its own: by how many milliseconds its
    longest step is longer when all ask. In other processes: how much more memory the first takes.
    """
    engines = [Engine(load, kind) for kind in ("silent", "all")]
    take_turns(load, engines)
    silent, asking = (engine.steps for engine in engines)
    starts = [i for i, step in enumerate(silent) if step["tokens"] >= load.prompt]
    record: dict[str, Any] = {"load": load.name, "what": str(load), "kind": "all", "base": "silent"}
    for label, parts in LABELS.items():
        more = [
            sum(second[part] - first[part] for part in parts)
            for first, second in zip(silent, asking, strict=True)
        ]
        longest = [max(part) for part in np.split(np.array(more), starts[1:])]
        assert len(longest) == load.requests // load.group
        record[label] = {
            "silent": float(np.median([sum(silent[i][part] for part in parts) for i in starts])),
            "longest": float(np.median(longest)) if len(longest) >= ENOUGH_PAIRS else None,
            "worst": max(longest),
        }
    single = dataclasses.replace(load, requests=load.group)
    record["peak"] = []
    for kind in ("silent", "all"):
        parent, child = PROCESSES.Pipe()
        process = PROCESSES.Process(target=peak_memory, args=(single, kind, child), daemon=True)
        process.start()
        child.close()
        record["peak"].append(parent.recv() / 1e6)
        process.join()
    return record


def profile(load: Load, kind: str) -> dict[str, Any]:
    """Profile the decode steps of a scheduler and its front end, which run in this process alone.

    Returns:
        For each function that the series adds, its calls a step and its microseconds a step:
        its own, which include what it spends in NumPy, and all.
    """
    core, processor = Core(load, kind), OutputProcessor(tokenizer=None, log_stats=False)
    for request in make_requests(load, kind):
        processor.add_request(request, None)
    decoder = MsgpackDecoder(EngineCoreOutputs)
    # Time spent in functions of C is their callers'.
    profiler = cProfile.Profile(time.thread_time, builtins=False)
    steps = 0
    gc.collect()
    gc.disable()
    while (stepped := core.step()) is not None:
        took, frames = stepped
        message = decoder.decode(frames)
        processor.add_routed_experts(message)
        processor.process_outputs(message.outputs)
        # From the first decode step on.
        if load.is_decode(int(took["requests"]), int(took["tokens"])):
            steps += 1
            profiler.enable()
    profiler.disable()
    gc.enable()
    functions: dict[str, list[float]] = {}
    for (path, _, name), (calls, _, own, total, _) in pstats.Stats(profiler).stats.items():
        if any(added in (file := Path(path).stem) for added in ADDED_FILES):
            # Decorators give several functions one name.
            values = functions.setdefault(f"{file}.{name}", [0.0, 0.0, 0.0])
            for i, value in enumerate((calls, 1e6 * own, 1e6 * total)):
                values[i] += value / steps
    return {"load": load.name, "what": str(load), "kind": kind, "functions": functions}


def measure_worker(requests: int, rounds: int = 40, calls: int = 50) -> dict[str, Any]:
    """Microseconds of `take_rows()` and of what makes lists of its rows, with one row a request."""
    torch.set_num_threads(1)
    req_ids = [str(i) for i in range(requests)]
    index_by_id = {req_id: i for i, req_id in enumerate(req_ids)}
    batch: Any = SimpleNamespace(req_ids=req_ids, req_id_to_index=index_by_id)
    query_start_loc = np.arange(requests + 1, dtype=np.int32)
    positions = torch.full((requests,), 100, dtype=torch.int32)
    asking = {"silent": set[str](), "one": {req_ids[requests // 2]}, "all": set(req_ids)}
    seconds: dict[str, list[float]] = {kind: [] for kind in asking}
    # The only pipeline stage. A mock of the function would take longer than the function.
    stage = SimpleNamespace(is_first_rank=True)

    def get_pp_group() -> Any:
        return stage

    alone = mock.patch.object(routed_experts_pipeline, "get_pp_group", get_pp_group)
    capturers = {}
    for kind in asking:
        capturers[kind] = RoutedExpertsCapturer(
            LAYERS, 2048, TOP_K, EXPERTS, tuple(range(LAYERS)), torch.device("cpu")
        )
        capturers[kind].req_ids = asking[kind]
    rng = np.random.default_rng(0)
    for _ in range(rounds):
        for kind in rng.permutation(list(asking)):
            with alone:
                begin = time.thread_time()
                for _ in range(calls):
                    taken = capturers[kind].take_rows(batch, query_start_loc, positions, requests)
                    if taken is not None:
                        taken.to_cpu_nonblocking().tolists()
            seconds[kind].append((time.thread_time() - begin) / calls)
    return {"load": "worker", **{kind: 1e6 * float(np.median(s)) for kind, s in seconds.items()}}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="file for the record, as Markdown; JSON beside it")
    arguments = parser.parse_args()
    worker = measure_worker(1024)
    decode = [r for load, kinds in DECODE.items() for r in measure_decode(load, kinds)]
    groups = [measure_group(load) for load in GROUPS]
    profiles = [profile(load, PROFILED[load.name]) for load in DECODE if load.name in PROFILED]
    builds = measure_builds(BUILDS) if PRISTINE.is_dir() else []
    records = [worker, *decode, *groups, *builds, *profiles]
    text = "\n".join(
        [
            budget_text(records),
            *map(parts_text, [*decode, *builds]),
            groups_text(groups),
            "\n## Worker\n\nMicroseconds of `take_rows()`, `to_cpu_nonblocking()` and "
            "`tolists()` of a step with 1,024 requests: "
            + ", ".join(f"{KINDS[kind]}: {worker[kind]:.1f}" for kind in ("silent", "one", "all"))
            + ". On a GPU, kernels copy the rows; the host launches them.\n\n## Profile\n\nOf the "
            "functions that the series adds, in an engine alone. Profiling itself takes a part of "
            "these times. What a function spends in NumPy is its own.\n",
            *map(profile_text, profiles),
        ]
    )
    print(text)
    if arguments.out:
        arguments.out.write_text(
            "# What rows cost the host\n\n"
            f"`python {' '.join(command())}`: {LAYERS} layers, top-{TOP_K}, uint8; vllm "
            f"{vllm.__version__}, Python {platform.python_version()}. Milliseconds of processor "
            'time a step. "More" is the median over the decode steps of the difference at the same '
            'step; "on average" is over rounds of a block\'s steps, in which every request fills '
            "a block, with its 95 % interval; it includes the first touch of each page's memory, "
            "which a server pays once. Two values are before, with."
            + ("" if builds else " Pristine vLLM was not there to be measured.")
            + "\n\n"
            + text
        )
        arguments.out.with_suffix(".json").write_text(json.dumps(records, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
