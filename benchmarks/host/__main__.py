# SPDX-License-Identifier: Apache-2.0
"""Measures what rows cost the host, beside the release itself.

    .venv-v0.33.0/bin/python -m benchmarks.host --out FILE

It needs no GPU. The installed series and the release run with generated tokens and random rows.
`make demo-pristine` builds the release; without it the series runs alone. The scheduler, the
worker's side of rows, message encoding and the front end's output processor take part. Rows have
the shape of DeepSeek-V3: 61 layers, top-8, one byte per id.

Builds take turns, each time in a new process. In it, engines without and with rows take turns, step
by step: other work on the machine changes both. Times are processor time of the process. They
include the threads that store rows and the threads of sockets. Not measured: capture on the GPU,
garbage collection.

**Decodes**: all requests fill their blocks in the same steps, so each of a block's steps has a
median of its own, and these are averaged.

**Groups**: all requests have one prompt and arrive together. The step that computes the prompt is
measured, and the one in which all requests end: it joins the rows of each answer. The peak of
memory is measured in a process of its own, in the step of the prompt. It includes the front end.
On v0.33.0 the store's memory is allocated before.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import ROOT, command, read_peak, table
from benchmarks.host import BLOCK, PARTS, TOP_K
from harness.lines import LINES, installed

GROUP_PROMPT, GROUP_OUTPUT = 8192, 4
# The engines of each build: whether the flag is on, and who asks.
ENGINES: dict[str, dict[str, tuple[bool, str]]] = {
    "release": {"flag off": (False, ""), "flag on": (True, "")},
    "series": {
        "flag off": (False, ""),
        "nobody asks": (True, "nobody"),
        "one asks": (True, "one"),
        "all ask": (True, "all"),
    },
}


def engines_of(args: argparse.Namespace, build: str) -> list[str]:
    names = list(ENGINES[build])
    if build == "release" and not LINES[args.on].tests["release_captures_here"]:
        names.remove("flag on")
    if args.group and "one asks" in names:
        names.remove("one asks")  # it would compute the prompt again
    return names


def make_engine(args: argparse.Namespace, name: str) -> Any:
    from benchmarks.host.engine import Engine

    flag, who = ENGINES[args.build][name]
    if args.group:
        return Engine(args.layers, args.group, GROUP_PROMPT, flag, who, group=True)
    return Engine(args.layers, args.requests, args.prompt, flag, who)


def measure(args: argparse.Namespace) -> dict[str, list[list[float]]]:
    """Milliseconds of each decode step by engine, and by part."""
    engines = {name: make_engine(args, name) for name in engines_of(args, args.build)}
    for engine in engines.values():
        engine.add(args.prompt, 1000)
        for _ in range(3):
            engine.step()
    gc.collect()
    gc.disable()
    found: dict[str, list[list[float]]] = {name: [] for name in engines}
    for _ in range(args.blocks * BLOCK):
        for name, engine in engines.items():
            found[name].append(engine.measured_step())
    return found


def measure_groups(args: argparse.Namespace, groups: int = 3) -> dict[str, Any]:
    """Milliseconds of the first and the last step of each group by engine, and by part."""
    engines = {name: make_engine(args, name) for name in engines_of(args, args.build)}
    found: dict[str, Any] = {name: {"prompt": [], "end": []} for name in engines}
    gc.disable()
    for _ in range(groups):
        for name, engine in engines.items():
            engine.add(GROUP_PROMPT, GROUP_OUTPUT, group=True)
            found[name]["prompt"].append(engine.measured_step())
            for _ in range(GROUP_OUTPUT - 2):
                engine.step()
            found[name]["end"].append(engine.measured_step())
            assert not engine.scheduler.requests
            gc.collect()
    return found


def measure_memory(args: argparse.Namespace) -> float:
    """Megabytes that the first group takes at the peak of its first step."""
    engine = make_engine(args, args.memory)
    engine.add(GROUP_PROMPT, GROUP_OUTPUT, group=True)
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the peak is what there is now
    before = read_peak()
    engine.step()
    return (read_peak() - before) / 1e6


def average(steps: np.ndarray) -> np.ndarray:
    """The mean over a block's steps, each the median of its repetitions. Takes (steps, ...)."""
    rounds = steps.reshape(-1, BLOCK, *steps.shape[1:])
    return np.median(rounds, axis=0).mean(axis=0)


def run_build(args: argparse.Namespace, build: str, **more: object) -> Any:
    """What a new process with the build found."""
    settings = {"on": args.on, "layers": args.layers, "build": build, **more}
    words = [f"--{name}={value}" for name, value in settings.items()]
    place = str(pristine(args)) if build == "release" else os.environ.get("PYTHONPATH", "")
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.host", *words],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([place, str(ROOT)])},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


def pristine(args: argparse.Namespace) -> Path:
    return ROOT / "build" / args.on / "pristine/site"


def more_rows(times: dict[tuple[str, str], Any], reduce: Callable[[np.ndarray], Any]) -> list[Any]:
    """Rows of a table: the time of a build without the flag, and what the others take more."""
    rows = []
    for (build, name), steps in times.items():
        values = np.array(steps)
        is_base = name == "flag off"
        if not is_base:
            values = values - np.array(times[build, "flag off"])
        cells = [*reduce(values), reduce(values.sum(axis=1))]
        rows.append(
            [f"{build}, {name}", *(f"{cell:.2f}" if is_base else f"{cell:+.2f}" for cell in cells)]
        )
    return rows


def report(args: argparse.Namespace) -> str:
    """Measure everything; the record."""
    builds = [build for build in ENGINES if build == "series" or pristine(args).is_dir()]
    decodes: dict[tuple[str, str], Any] = {}
    groups: dict[tuple[int, str], dict[tuple[str, str], Any]] = {}
    sizes = {name: getattr(args, name) for name in ("requests", "prompt", "blocks")}
    for _ in range(args.rounds):
        for build in builds:
            for name, steps in (run_build(args, build, **sizes) if args.requests else {}).items():
                decodes.setdefault((build, name), []).extend(steps)
            for size in args.groups:
                for name, found in run_build(args, build, group=size).items():
                    for step, values in found.items():
                        times = groups.setdefault((size, step), {})
                        times.setdefault((build, name), []).extend(values)
    memory = [
        [f"{build}, {name}"]
        + [f"{run_build(args, build, group=size, memory=name):.1f}" for size in args.groups]
        for build in builds
        for name in engines_of(args, build)
        if name != "one asks"
    ]
    head = ["", *PARTS, "**all**"]
    lines = [
        f"# Host time and memory of rows on the line {args.on}",
        "",
        f"`python {' '.join(command())}`: {args.layers} layers, top-{TOP_K}. "
        f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, load "
        f"{os.getloadavg()[1]:.0f}. Milliseconds of processor time. The first row of a build is "
        "the time, the others are what they take more.",
        "",
    ]
    if decodes:
        lines += [
            f"## A decode step of {args.requests} requests",
            "",
            f"{args.rounds} processes of {args.blocks * BLOCK} steps for each build.",
            "",
            table(head, more_rows(decodes, average)),
        ]
    for (size, step), times in groups.items():
        where = "The step of the prompt" if step == "prompt" else "The step in which all end"
        lines += [
            f"## {where}, {size} requests with one prompt of {GROUP_PROMPT:,}",
            "",
            f"The median of {3 * args.rounds} groups.",
            "",
            table(head, more_rows(times, lambda values: np.median(values, axis=0))),
        ]
    if args.groups:
        lines += [
            "## Megabytes that the step of the prompt takes at the peak",
            "",
            table(["", *(f"{size} requests" for size in args.groups)], memory),
        ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--on", choices=LINES, default=installed(), help="line of the installed vLLM (%(default)s)"
    )
    parser.add_argument("--requests", type=int, default=1024)
    parser.add_argument("--prompt", type=int, default=64, help="tokens of each prompt of a decode")
    parser.add_argument("--blocks", type=int, default=4, help="of 16 decode steps, in each process")
    parser.add_argument("--groups", type=int, nargs="*", default=[64, 256], help="their sizes")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--layers", type=int, default=61)
    parser.add_argument("--out", type=Path, help="Markdown file to write")
    parser.add_argument("--build", choices=ENGINES, help=argparse.SUPPRESS)
    parser.add_argument("--group", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--memory", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.build:
        run = measure_memory if args.memory else measure_groups if args.group else measure
        print(json.dumps(run(args)))
        return
    text = report(args)
    print(text)
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(text)


if __name__ == "__main__":
    main()
