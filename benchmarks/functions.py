# SPDX-License-Identifier: Apache-2.0
"""Host time of decode steps by function, with rows and without.

    python -m benchmarks.functions --model qwen3-30b-a3b --layers 14

One engine of the vLLM of this Python answers one request at a time, or `--requests`: silent, then
asking, and the other way round in the next round. First as it is; then with the functions of
`FUNCTIONS` timed, which takes time itself. A step is the time of one token of each request, also
where drafts make several at once. Times include what a function calls, and what it waits for.
Functions of the scheduler are seen where the worker shares its process, as with one GPU.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks.engine import engine_arguments, engine_options, generate_queued
from benchmarks.probe import Probe
from harness.shapes import write_model

TOKENS = 192
_RUNNER = "vllm.v1.worker.gpu_model_runner"
_CAPTURER = "vllm.model_executor.layers.fused_moe.routed_experts_capturer"
# Module, class, methods. Methods that are not called are left out of the table.
FUNCTIONS = [
    ("vllm.v1.core.sched.scheduler", "Scheduler", ["schedule", "update_from_output"]),
    (
        "vllm.v1.core.routed_experts",
        "RoutedExpertsManager",
        ["on_step_scheduled", "update", "pack"],
    ),
    (
        "vllm.v1.core.routed_experts_prefix_cache",
        "RoutedExpertsPrefixCache",
        ["limit", "on_blocks_cached"],
    ),
    (_RUNNER, "GPUModelRunner", ["execute_model", "_prepare_inputs", "sample_tokens"]),
    (_RUNNER, "AsyncGPUModelRunnerOutput", ["__init__", "get_output"]),
    (_CAPTURER, "RoutedExpertsCapturer", ["take_rows", "snapshot"]),
    ("vllm.v1.outputs", "RoutedExpertsTensors", ["to_cpu_nonblocking", "tolists"]),
    ("vllm.v1.serial_utils", "MsgpackEncoder", ["encode_into"]),
    ("vllm.v1.serial_utils", "MsgpackDecoder", ["decode"]),
    ("vllm.v1.engine.output_processor", "OutputProcessor", ["add_routed_experts"]),
]
# Seconds in this process, by function.
_spent: defaultdict[str, float] = defaultdict(float)


def time_functions() -> None:
    """Time every call of `FUNCTIONS` in this process from now on."""
    for module, owner, methods in FUNCTIONS:
        cls = getattr(importlib.import_module(module), owner)
        for method in methods:
            setattr(cls, method, _timed(f"{owner}.{method}", getattr(cls, method)))


def _timed(name: str, function: Any) -> Any:
    @functools.wraps(function)
    def timed(*args: Any, **kwargs: Any) -> Any:
        began = time.perf_counter()
        try:
            return function(*args, **kwargs)
        finally:
            _spent[name] += time.perf_counter() - began

    return timed


def take() -> dict[str, float]:
    """What was spent in this process since the last call."""
    spent = dict(_spent)
    _spent.clear()
    return spent


class FunctionsProbe(Probe):
    """The same in the process of the engine."""

    def probe_time_functions(self) -> None:
        time_functions()

    def probe_take(self) -> dict[str, float]:
        return take()


def measure(llm: Any, rounds: int, requests: int) -> dict[str, dict[bool, list[float]]]:
    """Microseconds of a step, by function and whether requests ask, without the first round."""
    from vllm import SamplingParams

    times: Any = defaultdict(lambda: {False: [], True: []})
    for number in range(rounds + 1):
        tokens = np.random.default_rng(number).integers(20, 84, (requests, 64)).tolist()
        prompts = [{"prompt_token_ids": prompt} for prompt in tokens]
        for asks in (False, True) if number % 2 else (True, False):
            params = SamplingParams(
                temperature=0.0,
                ignore_eos=True,
                max_tokens=TOKENS,
                detokenize=False,
                return_routed_experts=asks,
            )
            while not llm.reset_prefix_cache():  # a running step may hold blocks
                time.sleep(0.01)
            take()
            llm.collective_rpc("probe_take")
            spent = {"a step": generate_queued(llm, prompts, params)[1]}
            spent |= take() | llm.collective_rpc("probe_take")[0]
            if number:
                for name, seconds in spent.items():
                    times[name][asks].append(seconds / TOKENS * 1e6)
    return times


def table(title: str, times: dict[str, dict[bool, list[float]]]) -> str:
    """Markdown: medians."""
    lines = [f"| {title}, us a step, median | Silent | Asks |", "| --- | --- | --- |"]
    for name, of in times.items():
        cells = [f"{median(of[asks]):.0f}" if of[asks] else "-" for asks in (False, True)]
        lines.append(f"| {name} | {cells[0]} | {cells[1]} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").partition("\n\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--model", default="tiny", help="shape, see benchmarks.overhead")
    parser.add_argument("--layers", type=int, help="only so many layers")
    parser.add_argument("--requests", type=int, default=1, help="that run at once")
    parser.add_argument(
        "--kv-gib", type=float, default=5.0, help="KV cache; if it is small, requests wait"
    )
    parser.add_argument("--rounds", type=int, default=12, help="rounds of each table")
    parser.add_argument(
        "--options",
        type=engine_arguments,
        default={},
        metavar="JSON",
        help="more arguments of the engine, as for drafts",
    )
    args = parser.parse_args()
    from vllm import LLM

    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder), args.model, args.layers)
        llm = LLM(
            folder,
            load_format="dummy",
            skip_tokenizer_init=True,
            worker_extension_cls="benchmarks.functions.FunctionsProbe",
            enable_return_routed_experts=True,
            routed_experts_opt_in=True,
            **engine_options(args.model, args.kv_gib) | args.options,
        )
    print(table("As it is", measure(llm, args.rounds, args.requests)), flush=True)
    time_functions()
    llm.collective_rpc("probe_time_functions")
    print(table("Timed by function", measure(llm, args.rounds, args.requests)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
