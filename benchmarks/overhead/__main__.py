# SPDX-License-Identifier: Apache-2.0
"""Measures what routed experts cost: builds of vLLM and settings of the flag, in turns.

    python -m benchmarks.overhead --out OUT --minutes 8.5 \\
        --build patched=env-patched.sh --engine patched:off --engine patched:opt-in

There is one engine for each BUILD:FLAG, all at once on one GPU. Two builds with the same place
show how much engines of one kind differ. Only one engine runs at a time. In a round of a load, each
engine and each mode of it has a turn with the same prompts, in random order. The next round has
the reverse order. Ratios are taken within a round.

Every turn is appended to OUT/records.jsonl; a second run continues there, with the same or other
engines. OUT/report.md is written at the end, also when time is up or something failed. This
process needs no vLLM: each engine has its own process.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

import psutil

from benchmarks.common import WORK, Failure, Records, command, read_gpu, tell
from benchmarks.overhead.builds import Variant, read_builds, read_variants
from benchmarks.overhead.engine import Engine, engine_options, running
from benchmarks.overhead.loads import MODES, loads_of
from benchmarks.overhead.report import write_report
from harness.shapes import MODELS, model_config

# Seconds reserved for stopping the engines and writing the report.
END_S = 15.0
# A turn that takes longer hangs.
TURN_S = 90.0


def turns_of(
    variants: Sequence[Variant], modes: Sequence[str], seed: str, number: int
) -> list[tuple[int, str]]:
    """The turns of a round, in order: index of the variant and mode. Even rounds go in random
    order, odd ones in the reverse order of the round before."""
    turns = [(i, mode) for i, variant in enumerate(variants) for mode in variant.modes(modes)]
    random.Random(f"{seed} {number // 2}").shuffle(turns)
    return turns[::-1] if number % 2 else turns


class Bench:
    """The engines of one start, and the rounds they run."""

    def __init__(self, arguments: argparse.Namespace, records: Records, deadline: float) -> None:
        self.arguments = arguments
        self.records = records
        self.deadline = deadline
        self.loads = {name: loads_of(arguments.model)[name] for name in arguments.loads}
        self.variants = read_variants(arguments.engine, read_builds(arguments.build))
        self.start_number = len(records.of("start")) + 1
        self.engines: list[Engine] = []
        # Seconds of the last round by load, and of all rounds since the start.
        self.cost: dict[str, float] = {}
        self.spent = dict.fromkeys(self.loads, 0.0)

    def left(self) -> float:
        """Seconds until measuring must end."""
        return self.deadline - time.monotonic()

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Start the engines, one after the other; at the end, stop all."""
        arguments = self.arguments
        with contextlib.ExitStack() as stack:
            for variant in self.variants:
                options = engine_options(arguments.model, arguments.kv_gib)
                settings = {
                    "name": variant.name,
                    "model": arguments.model,
                    "layers": arguments.layers,
                    "options": {**options, **variant.options},
                }
                env = {"VLLM_CACHE_ROOT": str(WORK / "cache" / variant.build.name)}
                if arguments.model == "tiny":
                    env["TORCH_COMPILE_DISABLE"] = "1"
                log = WORK / "logs" / f"{variant.name.replace(' ', '-')}.log"
                self.engines.append(stack.enter_context(running(variant, settings, log, env)))
            # All import vLLM at once; then engines start in turn. So none chooses its kernels while
            # another keeps the GPU busy, and engines of one build share what the first compiled.
            for engine in self.engines:
                engine.hear(max(5.0, self.left()))
            started = []
            for engine in self.engines:
                began, kind = time.monotonic(), engine.variant
                told = engine.ask("start", max(5.0, self.left()))
                tell(f"{kind.name}: {told['vllm']}, ready after {time.monotonic() - began:.0f} s")
                named = {"name": kind.name, "build": kind.build.name, "flag": kind.flag}
                started.append(named | told)
            self.records.add(
                {
                    "kind": "start",
                    "start": self.start_number,
                    "command": command(),
                    "when": time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime()),
                    "cores": psutil.cpu_count(),
                    "engines": started,
                }
            )
            try:
                yield
            finally:
                for engine in self.engines:
                    engine.process.let_go()

    def round(self, name: str, number: int) -> None:
        """Run one round of a load; round 0 warms up."""
        turns = turns_of(self.variants, self.arguments.modes, name, number)
        began = time.monotonic()
        told = []
        for index, mode in turns:
            engine = self.engines[index]
            limit = max(10.0, min(TURN_S, self.left()))
            result = engine.ask("run", limit, load=name, mode=mode, number=number)
            self.records.add(
                {
                    "kind": "turn",
                    "start": self.start_number,
                    "load": name,
                    "round": number,
                    "of": len(turns),
                    "engine": engine.variant.name,
                    "mode": mode,
                    **result,
                    **read_gpu(),
                }
            )
            label = engine.variant.name + (f" {mode}" if mode != engine.variant.flag else "")
            told.append(f"{label} {result['seconds']:.3f}")
        self.cost[name] = time.monotonic() - began
        tell(f"{name} {number}: " + ", ".join(sorted(told)))

    def measure(self) -> None:
        """Run rounds until there are enough or time is up, always of the load that has used least
        of its share of the time."""
        names = [variant.name for variant in self.variants]
        wanted = self.arguments.rounds
        for name in self.loads:
            if self.left() < 0:
                return
            self.round(name, 0)
        done = self.records.rounds(names)
        while True:
            open_loads = [
                name
                for name in self.loads
                if done.get(name, 0) < wanted and self.cost[name] * 1.1 < self.left()
            ]
            if not open_loads:
                break
            name = min(open_loads, key=lambda n: self.spent[n] / self.loads[n].share)
            number = done.get(name, 0) + 1
            self.round(name, number)
            self.spent[name] += self.cost[name]
            done[name] = number


def read_arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for records and report")
    parser.add_argument(
        "--build",
        action="append",
        metavar="NAME=PLACE",
        help="a build: a script that selects it when sourced, a folder for PYTHONPATH, or nothing "
        "for the vLLM of this Python; repeat; the first one's `off` is what other builds' `off` "
        "is compared with",
    )
    parser.add_argument(
        "--engine",
        action="append",
        metavar="BUILD:FLAG",
        help="an engine: flag off, on or opt-in; or float32 or float16, which is opt-in with "
        "weights of the experts; repeat",
    )
    parser.add_argument(
        "--model", choices=MODELS, default="qwen3-30b-a3b" if read_gpu() else "tiny", help="shape"
    )
    parser.add_argument("--layers", type=int, help="only so many layers")
    parser.add_argument("--kv-gib", type=float, default=5.0, help="KV cache of each engine, GiB")
    parser.add_argument(
        "--loads", type=lambda text: text.split(","), help="which; all if not given"
    )
    parser.add_argument(
        "--modes",
        type=lambda text: text.split(","),
        default="silent,all",
        help="who asks in engines that let requests ask: no request (silent), every request for "
        "rows (all), or every request for rows and weights (both)",
    )
    parser.add_argument("--rounds", type=int, default=1000, help="rounds of each load")
    parser.add_argument("--minutes", type=float, default=8.5, help="time for everything")
    arguments = parser.parse_args(words)
    loads = loads_of(arguments.model)
    arguments.loads = arguments.loads or list(loads)
    if unknown := set(arguments.loads) - set(loads):
        parser.error(f"--loads: {', '.join(sorted(unknown))} not of {', '.join(loads)}")
    if unknown := set(arguments.modes) - set(MODES):
        parser.error(f"--modes: {', '.join(sorted(unknown))} not of {', '.join(MODES)}")
    arguments.build = arguments.build or ["patched="]
    arguments.engine = arguments.engine or ["patched:off", "patched:opt-in"]
    try:
        read_variants(arguments.engine, read_builds(arguments.build))
    except ValueError as error:
        parser.error(str(error))
    return arguments


def main() -> int:
    deadline = time.monotonic() - END_S
    arguments = read_arguments()
    deadline += 60 * arguments.minutes
    arguments.out.mkdir(parents=True, exist_ok=True)
    records = Records(arguments.out / "records.jsonl")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    status = 0
    try:
        loads = loads_of(arguments.model)
        config = model_config(arguments.model, arguments.layers)
        records.begin(
            {
                "model": arguments.model,
                "layers": config["num_hidden_layers"],
                "options": engine_options(arguments.model, arguments.kv_gib),
                "loads": {
                    name: {**asdict(load), "text": load.text} for name, load in loads.items()
                },
            }
        )
        bench = Bench(arguments, records, deadline)
        with contextlib.ExitStack() as stack:
            stack.enter_context(bench.running())
            try:
                bench.measure()
            finally:
                # Before the engines are stopped, which takes seconds.
                if records.of("turn"):
                    print(write_report(records.all, arguments.out), flush=True)
    except Failure as failure:
        tell(f"FAILED: {failure}")
        status = 1
    except KeyboardInterrupt:
        tell("stopped by a signal; run the same command to continue")
        status = 130
    return status


if __name__ == "__main__":
    raise SystemExit(main())
