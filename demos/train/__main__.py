# SPDX-License-Identifier: Apache-2.0
"""Trains a small MoE model with TRL, without and with route replay, and compares each step.

    make client-venvs CLIENTS=trl
    python -m demos.train [--out DIR] [--steps N] [--tokens N]
        [--break WHAT]

One server samples for both ways; each begins with the same weights and seeds. vLLM computes in
float32, the trainer in bfloat16. Before each rollout the server gets the trainer's weights, and all
rows of the rollout must be those of Hugging Face `transformers` with these weights. The weights are
random: the demo does not show that replay makes a model learn better.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from demos import program
from demos.program import Failure, Waiting
from demos.train import FAULTS, STEPS_FILE
from harness.lines import LINES, installed
from harness.process import Kept

ROOT = Path(__file__).resolve().parents[2]
PYTHON = ROOT / "build" / "clients" / "trl" / "bin" / "python"
# The repository has a folder vllm/, which TRL would take for the package.
PACKAGES = ("demos", "examples", "harness")
# Of each sample, by whether Triton's interpreter computes: then a token takes many times longer.
TOKENS = {False: 48, True: 24}
SERVER = [
    "--enable-return-routed-experts",
    "--routed-experts-opt-in",
    "--enable-prefix-caching",
    "--logprobs-mode=processed_logprobs",
    "--max-num-seqs=48",
]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo with command-line arguments; returns the exit status."""
    args = _arguments(argv)
    return program.run(lambda console: _show(args, console))


def _show(args: argparse.Namespace, console: Console) -> None:
    began = time.monotonic()
    out: Path = args.out
    env = program.prepare(out)
    if not PYTHON.exists():
        raise Failure(f"{PYTHON} is not there: `make client-venvs CLIENTS=trl` makes it")
    picture_file, record_file, steps_file = (
        out / name for name in ("steps.png", "record.md", STEPS_FILE)
    )
    for file in (picture_file, record_file, steps_file):
        file.unlink(missing_ok=True)  # a failed run must not show an older one's

    checkpoint = str((out / "checkpoint").resolve())
    run_trainer(out, "checkpoint", [checkpoint], console, "making a small random Qwen3-MoE")

    from demos.train import picture, report

    steps: list[report.Step] = []

    def read_steps() -> str:
        """Show the steps that are new; returns the last one's name."""
        lines = steps_file.read_text().splitlines() if steps_file.exists() else []
        for line in lines[len(steps) :]:
            steps.append(report.Step(**json.loads(line)))
            console.print(report.line(steps[-1]))
        return f"step {len(steps) % args.steps + 1} of {args.steps}"

    interpreted = "TRITON_INTERPRET" in LINES[installed()].environment
    env = {**env, "VLLM_SERVER_DEV_MODE": "1"}
    log = out / "server.log"
    with program.serving(console, out / "checkpoint", log, SERVER, env) as server:
        counts = (args.steps, args.tokens or TOKENS[interpreted])
        arguments = [str(out.resolve()), server.url, *map(str, counts), args.fault]
        run_trainer(out, "with_trl", arguments, console, "training", read_steps)
    read_steps()
    console.print()
    console.print(report.table(steps))
    record_file.write_text(report.record(steps))
    picture.draw(picture_file, steps)
    console.print(f"[bold]picture[/]     {escape(str(picture_file))}")
    if faults := report.faults(steps, args.steps):
        raise Failure("; ".join(faults))
    console.print(
        f"[bold green]PASSED[/]  {report.verdict(steps)} ({time.monotonic() - began:.0f} s)"
    )


def run_trainer(
    out: Path,
    name: str,
    arguments: Sequence[str],
    console: Console,
    what: str,
    progress: Callable[[], str] = lambda: "",
) -> None:
    """Run a module of the demo in the trainer's environment; `progress` returns what to show while
    it runs. Raises Failure with its first error."""
    site = out / "site"
    site.mkdir(exist_ok=True)
    for package in PACKAGES:
        (site / package).unlink(missing_ok=True)
        (site / package).symlink_to(ROOT / package)
    command = [str(PYTHON), "-W", "ignore", "-m", f"demos.train.{name}", *arguments]
    log = out / f"{name}.log"
    env = {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(site.resolve())}
    with Kept(command, log, env, cwd=site) as trainer, Waiting(console, what) as waiting:
        while trainer.poll() is None:
            waiting.progress(waiting.elapsed, progress())
            time.sleep(0.2)
        if trainer.poll():
            why = trainer.first_error() or trainer.last_line()
            raise Failure(f"demos.train.{name} failed: {why} (log: {log})")


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = program.arguments(
        "demos.train",
        "Train a small random MoE model with TRL on rollouts of the installed vLLM, without and "
        "with route replay, and compare every step.",
        out="build/train",
    )
    parser.add_argument("--steps", type=int, default=4, help="optimizer steps (%(default)s)")
    parser.add_argument("--tokens", type=int, help="tokens of each sample (48; v0.33.0: 24)")
    told = "; ".join(f"{name}: {what}" for name, what in FAULTS.items())
    parser.add_argument(
        "--break", dest="fault", choices=FAULTS, default="", help=f"must fail: {told}"
    )
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
