# SPDX-License-Identifier: Apache-2.0
"""Measures route replay: a trainer with and without the routes of the server that sampled.

    python -m demos.replay [--out DIR] [--router-std S]

vLLM samples in float32; a Hugging Face model computes the log-probs of the same tokens in bfloat16,
once with experts of its own choice and once with the server's.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from tokenizers import Tokenizer

from demos import program
from demos.program import Failure
from examples.client import Completion, generate
from harness import text

# A small Qwen3-MoE. Its weights are bfloat16 numbers, as published ones are: server and trainer
# have equal weights and differ only in how they compute.
MODEL: dict[str, Any] = {
    "dtype": "bfloat16",
    "num_hidden_layers": 8,
    "num_experts": 32,
    "moe_intermediate_size": 32,
}
# Inputs of a router are normalised and have size 64: this gives logits of standard deviation 1.
ROUTER_STD = 0.125

# Lengths of the prompts, cut from the passages.
PROMPTS = {"harbour": 160, "sorting": 128, "code": 96, "ledger": 80, "kitchen": 64, "scripts": 48}
SAMPLING: dict[str, Any] = {
    "n": 8,
    "max_tokens": 128,
    "ignore_eos": True,
    # The server's log-probs are then those of the distribution that it sampled from.
    "temperature": 1.0,
    "logprobs": 0,
}
SERVER = ["--enable-return-routed-experts", "--routed-experts-opt-in", "--max-num-seqs=32"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the comparison with command-line arguments; returns the exit status."""
    args = _arguments(argv)
    return program.run(lambda console: _compare(args, console))


def _compare(args: argparse.Namespace, console: Console) -> None:
    began = time.monotonic()
    out: Path = args.out
    env = program.prepare(out)
    picture_file, record_file = out / "mismatch.png", out / "record.md"
    for file in (picture_file, record_file):
        file.unlink(missing_ok=True)  # a failed run must not show an older one's
    checkpoint = program.checkpoint(console, out, router_std=args.router_std, **MODEL)

    with ThreadPoolExecutor(1) as background:
        # Loading transformers takes seconds: use those in which the server starts.
        loading = background.submit(_load, checkpoint)
        with program.serving(console, checkpoint, out / "server.log", SERVER, env) as server:
            completions = _sample(server.url, checkpoint, console)
        model = loading.result()

    import torch

    from demos.replay import mismatch, picture, report

    with console.status("computing log-probs in float32"):
        control = mismatch.measure(model, completions, replayed=False)
    with console.status("computing log-probs in bfloat16, without and with the server's routes"):
        model = mismatch.load(checkpoint, torch.bfloat16)
        plain = mismatch.measure(model, completions, replayed=False)
        replayed = mismatch.measure(model, completions, replayed=True)
    result = report.Result(completions, args.router_std, control, plain, replayed)
    console.print()
    console.print(report.table(result))
    console.print(f"[bold]{report.verdict(result)}[/]")
    record_file.write_text(report.record(result))
    with console.status("drawing"):
        picture.draw(picture_file, result)
    console.print(f"[bold]picture[/]     {escape(str(picture_file))}")
    if faults := report.faults(result):
        raise Failure("; ".join(faults))
    console.print(
        f"[bold green]PASSED[/]  replay is {result.gain} times nearer to the server's log-probs "
        f"({time.monotonic() - began:.0f} s)"
    )


def _load(checkpoint: Path) -> Any:
    """The trainer's model in float32."""
    import torch

    from demos.replay import mismatch

    return mismatch.load(checkpoint, torch.float32)


def _sample(url: str, checkpoint: Path, console: Console) -> list[Completion]:
    """Complete every prompt as a group; every other one is streamed, for the same result."""
    tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))

    def ask(number: int) -> list[Completion]:
        name, length = [*PROMPTS.items()][number]
        prompt = tokenizer.encode(text.PASSAGES[name]).ids[:length]
        return generate(url, prompt, {**SAMPLING, "seed": number}, stream=number % 2 == 1)

    began = time.monotonic()
    with console.status("asking"), ThreadPoolExecutor(len(PROMPTS)) as senders:
        groups = list(senders.map(ask, range(len(PROMPTS))))
    completions = [completion for group in groups for completion in group]
    if len(completions) != len(PROMPTS) * SAMPLING["n"]:
        raise Failure(f"{len(completions)} completions came for {len(PROMPTS)} prompts")
    rows = sum(len(c.rows) for c in completions)
    tokens = sum(len(c.token_ids) for c in completions)
    console.print(
        f"[bold]answers[/]     {len(completions)} completions of {len(PROMPTS)} prompts: "
        f"{tokens:,} sampled tokens, {rows:,} rows, {time.monotonic() - began:.1f} s"
    )
    return completions


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = program.arguments(
        "demos.replay",
        "Sample from a small random MoE model with the installed vLLM in float32, and "
        "compare its log-probs with a trainer's in bfloat16, without and with its routes.",
        out="build/replay",
    )
    parser.add_argument(
        "--router-std",
        type=float,
        default=ROUTER_STD,
        help="standard deviation of the routers' weights, an eighth of their logits' (%(default)s)",
    )
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
