# SPDX-License-Identifier: Apache-2.0
"""Prefill and decode in two engines: compares every row of their joined answers.

    python -m demos.disaggregated [--out DIR] [--on LINE]

Two `vllm serve` of a small MoE model share KV through files (ExampleConnector), behind the proxy.
Every row of an answer is compared with Hugging Face `transformers`.

Exit status: 0 all rows agree; 1 failed, with the reason in one sentence; 2 wrong arguments; 130 or
143 ended by Ctrl-C or SIGTERM.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from rich.console import Console
from tokenizers import Tokenizer

from demos import program
from demos.program import Failure
from demos.rows import report
from examples import proxy
from examples.client import Completion, generate
from harness import disaggregated, text
from harness.lines import LINES, installed
from harness.oracle import Comparison, Oracle, compare
from harness.server import Server

# Lengths of the prompts, cut from the passages. A block has 32 tokens.
PROMPTS = {"harbour": 160, "sorting": 129, "code": 96, "ledger": 77, "kitchen": 64, "scripts": 20}
SAMPLING = {"n": 2, "max_tokens": 24, "ignore_eos": True, "temperature": 1.0}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo with command-line arguments; returns the exit status."""
    args = _arguments(argv)
    return program.run(lambda console: _show(args, console))


def _show(args: argparse.Namespace, console: Console) -> None:
    began = time.monotonic()
    out: Path = args.out
    env = program.prepare(out)
    checkpoint = program.checkpoint(console, out)
    storage = out / "kv"
    shutil.rmtree(storage, ignore_errors=True)  # the connector would find KV of an earlier run

    with ThreadPoolExecutor(1) as background:
        # Loading transformers takes seconds: use those in which the engines start.
        loading = background.submit(Oracle, checkpoint)
        first, second = (
            disaggregated.arguments(storage, role)
            for role in (disaggregated.PREFILL, disaggregated.DECODE)
        )
        with (
            program.serving(
                console, checkpoint, out / "prefill.log", first, env, args.on
            ) as prefill,
            program.serving(
                console, checkpoint, out / "decode.log", second, env, args.on
            ) as decode,
            proxy.running(prefill.url, decode.url) as url,
        ):
            completions = _ask(url, checkpoint, decode, console)
        oracle = loading.result()

    total = Comparison()
    with console.status("comparing every row with transformers"):
        for completion in completions:
            tokens = [*completion.prompt, *completion.token_ids]
            total += compare(completion.rows, oracle.route(tokens), completion.start)
    console.print(f"[bold]{report.summary(total)}[/]")
    if total.disagreements:
        raise Failure(f"{total.rows - total.agree} rows are wrong: {total.disagreements[0]}")
    console.print(
        f"[bold green]PASSED[/]  every row of the joined answers is what transformers chooses "
        f"({time.monotonic() - began:.0f} s)"
    )


def _ask(url: str, checkpoint: Path, decode: Server, console: Console) -> list[Completion]:
    """Complete every prompt twice; every other one is streamed."""
    tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))

    def ask(number: int) -> list[Completion]:
        name, length = [*PROMPTS.items()][number]
        prompt = tokenizer.encode(text.PASSAGES[name]).ids[:length]
        return generate(url, prompt, {**SAMPLING, "seed": number}, stream=number % 2 == 1)

    with console.status("asking"), ThreadPoolExecutor(len(PROMPTS)) as senders:
        groups = list(senders.map(ask, range(len(PROMPTS))))
    completions = [completion for group in groups for completion in group]
    if late := [c.start for c in completions if c.start]:
        raise Failure(f"rows of a joined answer begin at position {late[0]}")
    received = int(decode.metric(disaggregated.RECEIVED) or 0)
    prompts = sum(len(c.prompt) for c in completions)
    rows = sum(len(c.rows) for c in completions)
    console.print(
        f"[bold]answers[/]     {len(completions)} completions of {len(groups)} prompts, {rows:,} "
        f"rows; the decode engine received the KV of {received:,} of {prompts:,} prompt tokens"
    )
    if not received:
        raise Failure("the decode engine received no KV: nothing was joined")
    return completions


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = program.arguments(
        "demos.disaggregated",
        "Serve a small random MoE model with a prefill and a decode engine behind a "
        "proxy that joins their rows, and compare these with Hugging Face transformers.",
        out="build/disaggregated",
    )
    parser.add_argument(
        "--on", choices=LINES, default=installed(), help="line of the installed vLLM (%(default)s)"
    )
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
