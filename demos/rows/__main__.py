# SPDX-License-Identifier: Apache-2.0
"""The demo: serve a small MoE model, get the experts of every token over HTTP, and check them.

    python -m demos.rows [--out DIR] [--corrupt | --pristine]

Exit status: 0 all rows agree; 1 failed, with the reason in one sentence; 2 wrong arguments; 130 or
143 ended by Ctrl-C or SIGTERM. No process is left behind.
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
from demos.rows import report
from examples.client import Completion, Rows
from harness import text
from harness.oracle import Comparison, Oracle, compare

CHUNK = 64  # tokens per engine step: longer prompts are prefilled in pieces
MOST_TOLD = 5  # disagreements named one by one

# Greedy, with a penalty: a random model would repeat one token forever.
SAMPLING: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True, "repetition_penalty": 1.3}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo with command-line arguments; returns the exit status."""
    args = _arguments(argv)
    return program.run(lambda console: _demo(args, console))


def _demo(args: argparse.Namespace, console: Console) -> None:
    began = time.monotonic()
    out: Path = args.out
    env = program.prepare(out)
    picture_file = out / "routes.png"
    picture_file.unlink(missing_ok=True)  # a failed run must not show an older one's

    checkpoint = program.checkpoint(console, out)
    tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    prompts = text.prompts(lambda passage: tokenizer.encode(passage).ids, CHUNK)
    with ThreadPoolExecutor(1) as background:
        # Loading transformers takes seconds: use those in which the server starts.
        loading = background.submit(Oracle, checkpoint)
        answers = _ask(args, checkpoint, prompts, env, console)
        rows = [answer.rows for answer in answers if len(answer.rows)]
        if len(rows) < len(answers):
            reason = "the answer has no routed_experts field"
            raise Failure(f"this vLLM does not return routed experts: {reason}")
        if args.pristine:
            if not any(r.any() for r in rows):
                count, (layers, top_k) = sum(map(len, rows)), rows[0].shape[1:]
                raise Failure(
                    f"this vLLM returns only zero rows ({count:,} rows of {layers} layers x "
                    f"{top_k} ids, all 0)"
                )
            raise Failure("this vLLM is not pristine: its answers have routed_experts")
        oracle = loading.result()

    if args.corrupt:
        rows[0] = _corrupt(prompts[0], rows[0], oracle, console)
    with console.status("comparing every row with transformers"):
        results = [_check(p, a, r, oracle) for p, a, r in zip(prompts, answers, rows, strict=True)]
    total = sum(results, Comparison())
    uses = report.layer_uses(rows, oracle.layers, oracle.num_experts)
    console.print()
    console.print(f"[bold]{report.summary(total)}[/]")
    _tell_disagreements(prompts, results, console)
    if faults := report.faults(total, uses):
        raise Failure("; ".join(faults))

    with console.status("drawing"):
        from demos.rows import picture

        sequence = picture.Sequence(
            rows=rows[0],
            text=tokenizer.decode(answers[0].prompt),
            prompt_tokens=len(answers[0].prompt),
            chunk=CHUNK,
        )
        picture.draw(picture_file, uses, sequence, oracle.top_k, report.summary(total))
    console.print(f"[bold]picture[/]  {escape(str(picture_file))}")
    console.print(
        f"[bold green]PASSED[/]  every row is what transformers chooses "
        f"({time.monotonic() - began:.0f} s)"
    )


def _ask(
    args: argparse.Namespace,
    checkpoint: Path,
    prompts: Sequence[text.Prompt],
    env: dict[str, str],
    console: Console,
) -> list[Completion]:
    """Start a server, send it the prompts wave by wave, and stop it. Returns answers in order."""
    arguments = [
        "--enable-return-routed-experts",
        "--enable-prefix-caching",
        "--enable-chunked-prefill",
        f"--max-num-batched-tokens={CHUNK}",
    ]
    log = args.out / "server.log"
    answers: dict[str, Completion] = {}
    with program.serving(console, checkpoint, log, arguments, env) as server:
        began = time.monotonic()
        with console.status("asking"), ThreadPoolExecutor(8) as senders:
            for wave in sorted({p.wave for p in prompts}):
                sent = {
                    p.name: senders.submit(
                        server.generate,
                        p.token_ids,
                        states_place=not args.pristine,
                        max_tokens=p.max_tokens,
                        **SAMPLING,
                    )
                    for p in prompts
                    if p.wave == wave
                }
                answers.update({name: future.result() for name, future in sent.items()})
        took = time.monotonic() - began
        asked = sum(len(a.prompt) for a in answers.values())
        got = sum(len(a.token_ids) for a in answers.values())
        console.print(
            f"[bold]answers[/]     {len(answers)} prompts of {asked:,} tokens, up to {CHUNK} a "
            f"step; {got} new tokens, {took:.1f} s"
        )
        hits = server.metric("vllm:prefix_cache_hits_total")
        if hits is not None:
            console.print(f"[bold]prefix cache[/]  {hits:,.0f} of these prompt tokens came from it")
    return [answers[p.name] for p in prompts]


def _check(prompt: text.Prompt, answer: Completion, rows: Rows, oracle: Oracle) -> Comparison:
    """Compare one answer's rows with the oracle's route through the same tokens."""
    if answer.start != 0:
        raise Failure(f"prompt {prompt.name!r}: rows start at {answer.start}, 0 was asked for")
    if answer.moe_layers != oracle.layers:
        raise Failure(
            f"prompt {prompt.name!r}: moe_layers is {list(answer.moe_layers)}, "
            f"transformers has routers in {list(oracle.layers)}"
        )
    if rows.shape[-1] != oracle.top_k or len(answer.token_ids) != prompt.max_tokens:
        raise Failure(
            f"prompt {prompt.name!r}: {len(answer.token_ids)} tokens with rows of shape "
            f"{rows.shape}; wanted {prompt.max_tokens} tokens, top-{oracle.top_k}"
        )
    routes = oracle.route(answer.prompt + answer.token_ids)
    try:
        return compare(rows, routes)
    except ValueError as e:
        raise Failure(f"prompt {prompt.name!r}: {e}") from e


def _tell_disagreements(
    prompts: Sequence[text.Prompt], results: Sequence[Comparison], console: Console
) -> None:
    """Name the first few decisions that differ, and count the others."""
    told = [
        f"prompt {prompt.name!r}: {disagreement}"
        for prompt, result in zip(prompts, results, strict=True)
        for disagreement in result.disagreements
    ]
    for line in told[:MOST_TOLD]:
        console.print(f"  {escape(line)}", soft_wrap=True)
    if len(told) > MOST_TOLD:
        console.print(f"  … and {len(told) - MOST_TOLD:,} more decisions")


def _corrupt(prompt: text.Prompt, rows: Rows, oracle: Oracle, console: Console) -> Rows:
    """A copy with one id replaced by an expert that its row does not have."""
    rows = rows.copy()
    position = len(prompt.token_ids) + prompt.max_tokens // 2  # among the generated tokens
    layer = oracle.layers[-1]
    ids = rows[position, layer]
    old, new = int(ids[0]), next(e for e in range(oracle.num_experts) if e not in ids)
    ids[0] = new
    console.print(
        f"[bold yellow]corrupted[/]   on purpose: prompt {prompt.name!r}, position {position}, "
        f"layer {layer}: expert {old} became {new}"
    )
    return rows


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = program.arguments(
        "demos.rows",
        "Serve a small random MoE model with the installed vLLM, get every "
        "token's experts over HTTP and compare them with Hugging Face transformers.",
        out="build/demo",
    )
    way = parser.add_mutually_exclusive_group()
    way.add_argument(
        "--corrupt", action="store_true", help="change one captured id first; must then fail"
    )
    way.add_argument(
        "--pristine", action="store_true", help="say what an unpatched vLLM returns; must fail"
    )
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
