# SPDX-License-Identifier: Apache-2.0
"""Measures a rollout of several turns over HTTP: bytes and time of each turn, with all rows sent
again and with start offsets.

    .venv-v0.33.0/bin/python -m benchmarks.turns --out FILE
    python -m benchmarks.turns --on LINE --model qwen3-30b-a3b --new 1000 --sampled 128 --out FILE

Without `--model` it needs no GPU. With it, a GPU serves a published shape with random weights.

One server with prefix caching and `--routed-experts-opt-in`. In each round three conversations of
equal lengths, in changing order: silent; all rows in each turn; `routed_experts_prompt_start` at
the last token of the turns before. Each is the only one that runs. Every conversation has tokens
of its own, so it hits the prefix cache of its own earlier turns alone. A turn's time ends when its
rows are an array. In the last round, the joined rows are compared with the rows of the whole
sequence. On a GPU, sums of a whole sequence are added in another order, so some decisions differ.
The record says how many.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from benchmarks.common import Failure, command, table
from examples.client import PATH, Completion, join
from examples.clients.turns import join_turns
from harness import hosts
from harness.checkpoint import make_checkpoint
from harness.lines import LINES, installed
from harness.paired import compare
from harness.server import Server, ServerError
from harness.shapes import MODELS, write_model

MODEL: dict[str, Any] = {
    "num_hidden_layers": 16,
    "num_experts": 32,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 32,
}
SERVER = ["--enable-return-routed-experts", "--routed-experts-opt-in"]
# On a GPU: CUDA graphs, and a KV cache that keeps all conversations of a round.
GPU = [
    *("--load-format=dummy", "--dtype=bfloat16", "--no-enforce-eager"),
    f"--kv-cache-memory-bytes={4 << 30}",
]
TURNS = 5
# What a turn asks for, by the name of the conversation.
MODES = ("silent", "all rows", "new rows")


@dataclass(frozen=True)
class Turn:
    """One request."""

    size: int  # bytes of the answer's body
    seconds: float  # from sending the request until its rows are decoded
    completion: Completion | None
    tokens: tuple[int, ...]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark with command-line arguments; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="the record, Markdown")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument(
        "--on", choices=LINES, default=installed(), help="line of the installed vLLM (%(default)s)"
    )
    parser.add_argument("--model", choices=MODELS, help="serve this shape on a GPU")
    parser.add_argument("--new", type=int, default=300, help="new tokens of a turn (%(default)s)")
    parser.add_argument(
        "--sampled", type=int, default=32, help="sampled tokens of a turn (%(default)s)"
    )
    args = parser.parse_args(argv)
    try:
        rounds, differ = measure(args)
    except (Failure, ServerError) as e:
        print(f"error: {e}", file=sys.stderr)
        return 1
    args.out.write_text(report(rounds, args.new, args.sampled, differ))
    print(args.out.read_text())
    return 0


def measure(args: argparse.Namespace) -> tuple[list[dict[str, list[Turn]]], str]:
    """Play the rounds; the turns of each by mode, and how the joined rows compare."""
    rng = np.random.default_rng(0)
    rounds = []
    server_args = [*SERVER, f"--max-model-len={TURNS * (args.new + args.sampled) + 512}"]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if args.model:
            # The settings that a line has for its servers are for a CPU.
            options: dict[str, Any] = {"env": {**hosts.environment(), "TORCH_COMPILE_DISABLE": "0"}}
            write_model(folder / "model", args.model)
            make_checkpoint(folder / "tokenizer")
            server_args += [*GPU, f"--tokenizer={folder / 'tokenizer'}"]
            if "--enable-scale-out" in LINES[args.on].arguments:
                server_args.append("--enable-scale-out")
        else:
            options = {"line": args.on}
            make_checkpoint(folder / "model", **MODEL)
        with (
            Server(folder / "model", folder / "server.log", server_args, **options) as server,
            httpx.Client(base_url=server.url, timeout=120, trust_env=False) as client,
        ):
            for n in range(-1, args.rounds):  # the first one warms up
                order = [MODES[(n + i) % len(MODES)] for i in range(len(MODES))]
                played = {mode: list(converse(client, mode, rng, args)) for mode in order}
                if n >= 0:
                    rounds.append(played)
            wrong, of = check(client, [turn for turn in played["new rows"] if turn.completion])
    if wrong and not args.model:
        raise Failure(f"{wrong} of {of} joined decisions differ from the whole sequence")
    return rounds, f"{wrong:,} of {of:,}"


def converse(
    client: httpx.Client, mode: str, rng: np.random.Generator, args: argparse.Namespace
) -> Iterator[Turn]:
    """One conversation."""
    said: list[int] = []
    for _ in range(TURNS):
        start = max(0, len(said) - 1) if mode == "new rows" else 0
        prompt = [*said, *(int(t) for t in rng.integers(4, 700, args.new))]
        turn = ask(client, prompt, start, args.sampled, silent=mode == "silent")
        said = [*prompt, *turn.tokens]
        yield turn


def ask(
    client: httpx.Client, prompt: list[int], start: int, sampled: int, *, silent: bool = False
) -> Turn:
    sampling: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True, "max_tokens": sampled}
    if not silent:
        sampling |= {"return_routed_experts": True, "routed_experts_prompt_start": start}
    body = {"token_ids": prompt, "sampling_params": sampling}
    began = time.perf_counter()
    reply = client.post(PATH, json=body)
    if reply.status_code != 200:
        raise Failure(f"the server answered {reply.status_code}: {reply.text[:200]}")
    answer = reply.json()
    completion = None if silent else join(prompt, [answer])[0]
    seconds = time.perf_counter() - began
    return Turn(len(reply.content), seconds, completion, tuple(answer["choices"][0]["token_ids"]))


def check(client: httpx.Client, turns: list[Turn]) -> tuple[int, int]:
    """How many decisions in the turns' joined rows differ from the whole sequence, and how many
    there are."""
    joined = join_turns([turn.completion for turn in turns if turn.completion])
    whole = ask(client, [*joined.prompt, *joined.token_ids], 0, 1).completion
    assert whole is not None
    same = np.sort(joined.rows, axis=-1) == np.sort(whole.rows[: len(joined.rows)], axis=-1)
    decisions = same.all(axis=-1)
    return int((~decisions).sum()), decisions.size


def report(
    rounds: list[dict[str, list[Turn]]], new: int = 300, sampled: int = 32, differ: str = ""
) -> str:
    """The record. `differ` says how many joined decisions differ from the whole sequence."""

    def millis(mode: str, turn: int) -> float:
        return 1e3 * statistics.median(played[mode][turn].seconds for played in rounds)

    def kilobytes(mode: str, turn: int) -> float:
        return statistics.median(played[mode][turn].size for played in rounds) / 1e3

    def longer(mode: str, turn: int) -> str:
        times, silent = (
            [played[name][turn].seconds for played in rounds] for name in (mode, "silent")
        )
        return str(compare(times, silent))

    head = ["Turn", "Prompt tokens", *(f"{mode}, kB" for mode in MODES)]
    head += [
        *(f"{mode}, ms" for mode in MODES),
        *(f"{mode}, longer than silent" for mode in MODES[1:]),
    ]
    lines = []
    for turn in range(TURNS):
        tokens = new * (turn + 1) + sampled * turn
        lines.append(
            [
                str(turn + 1),
                str(tokens),
                *(f"{kilobytes(mode, turn):,.1f}" for mode in MODES),
                *(f"{millis(mode, turn):,.0f}" for mode in MODES),
                *(longer(mode, turn) for mode in MODES[1:]),
            ]
        )
    sums = {mode: sum(kilobytes(mode, turn) for turn in range(TURNS)) for mode in MODES}
    completion = rounds[0]["all rows"][0].completion
    shape = completion.rows.shape[1:] if completion else (0, 0)
    setting = (
        "{} layers, top-{}; ".format(*shape) + f"{new} new and {sampled} sampled tokens a turn; "
        f"prefix caching; {len(rounds)} rounds; {os.cpu_count()} cores, at the end "
        f"with a load average of {os.getloadavg()[2]:.0f} in 15 minutes; "
        f"vllm {importlib.metadata.version('vllm')}. Medians of the rounds; differences within a "
        "round: the Hodges-Lehmann estimate, and the 95 % interval of Wilcoxon's signed-rank test."
    )
    whole = (
        f"All turns: {sums['all rows']:,.0f} kB with all rows each time, "
        f"{sums['new rows']:,.0f} kB with new rows alone, {sums['silent']:,.0f} kB without "
        f"rows. In the joined rows of the last conversation, {differ} decisions (one token and one "
        "layer) differ from one request with the whole sequence as its prompt."
    )
    title = f"# A rollout of {TURNS} turns over HTTP"
    run = f"`python {' '.join(command())}`: {setting}"
    return "\n\n".join([title, run, table(head, lines).rstrip(), whole]) + "\n"


if __name__ == "__main__":
    sys.exit(main())
