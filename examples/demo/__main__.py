# SPDX-License-Identifier: Apache-2.0
"""The demo: serve a small MoE model, get every token's experts over HTTP, prove them true.

    python -m examples.demo [--out DIR] [--corrupt | --pristine]

Exit status: 0 shown and proven; 1 not so, with the reason in one sentence; 2 wrong
arguments; 130 or 143 ended by Ctrl-C or SIGTERM. No process is left behind in any case.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import FrameType
from typing import NoReturn

from rich.console import Console
from rich.markup import escape
from tokenizers import Tokenizer

from examples.demo import report, text
from examples.demo.checkpoint import SETTINGS_FILE, make_checkpoint
from examples.demo.oracle import Comparison, Oracle, compare
from examples.demo.server import Answer, Kept, Rows, Server, ServerError

CHUNK = 64  # tokens per engine step: longer prompts are prefilled in pieces
NEEDED_BYTES = 200 << 20
MOST_TOLD = 5  # disagreements named one by one

# Greedy, but a random model would repeat one token for ever: forbid that mildly.
SAMPLING = {"temperature": 0.0, "ignore_eos": True, "repetition_penalty": 1.3}


class DemoError(Exception):
    """The demo fails; the text is the one sentence that says why."""


class _Signalled(BaseException):
    """A signal asks the demo to end; like KeyboardInterrupt no `Exception`."""

    def __init__(self, number: int) -> None:
        self.number = number


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo with command-line arguments; returns the exit status."""
    args = _arguments(argv)
    # Without a terminal rich assumes 80 columns, too few for the table.
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 110)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _raise)
    try:
        _demo(args, console)
    except (DemoError, ServerError, ValueError) as e:
        console.print(f"[bold red]FAILED[/]  {escape(str(e))}", soft_wrap=True)
        return 1
    except OSError as e:
        where = f"{e.filename}: " if e.filename else ""
        reason = escape(where + (e.strerror or str(e)))
        console.print(f"[bold red]FAILED[/]  {reason}", soft_wrap=True)
        return 1
    except KeyboardInterrupt:
        console.print("[bold red]STOPPED[/]  by Ctrl-C")
        return 130
    except _Signalled as e:
        name = signal.Signals(e.number).name
        console.print(f"[bold red]STOPPED[/]  by {name}")
        return 128 + e.number
    return 0


def _demo(args: argparse.Namespace, console: Console) -> None:
    began = time.monotonic()
    out: Path = args.out
    _check_place(out)
    picture_file = out / "routes.png"
    picture_file.unlink(missing_ok=True)  # a failed run must not show an older one's

    checkpoint = out / "checkpoint"
    settings = checkpoint / SETTINGS_FILE
    before = settings.stat().st_mtime_ns if settings.exists() else None
    with console.status("making a small random Qwen3-MoE checkpoint"):
        make_checkpoint(checkpoint)
    how = "reused" if before == settings.stat().st_mtime_ns else "made"
    console.print(f"[bold]checkpoint[/]  {escape(str(checkpoint))}, {how}")

    tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    prompts = text.prompts(lambda passage: tokenizer.encode(passage).ids, CHUNK)
    # vLLM's and matplotlib's caches go to the build folder too, not into the user's home.
    cache = (out / "cache").resolve()
    env = {"VLLM_CACHE_ROOT": str(cache / "vllm")}
    os.environ.setdefault("MPLCONFIGDIR", str(cache / "matplotlib"))
    with ThreadPoolExecutor(1) as background:
        # Loading transformers takes seconds: use those in which the server starts.
        loading = background.submit(Oracle, checkpoint)
        answers = _ask(checkpoint, prompts, out / "server.log", env, console)
        rows = [answer.rows for answer in answers if answer.rows is not None]
        if len(rows) < len(answers):
            reason = "the answer has no routed_experts field"
            if args.pristine:
                reason += f", and {_look_offline(checkpoint, out, env, console)}"
            raise DemoError(f"this vLLM does not return routed experts: {reason}")
        if args.pristine:
            raise DemoError("this vLLM is not pristine: its answers have routed_experts")
        oracle = loading.result()

    if args.corrupt:
        rows[0] = _corrupt(prompts[0], rows[0], oracle, console)
    with console.status("comparing every row with transformers"):
        results = [_check(p, a, r, oracle) for p, a, r in zip(prompts, answers, rows, strict=True)]
    total = sum(results, Comparison())
    uses = report.layer_uses(rows, oracle.layers, oracle.num_experts)
    console.print()
    console.print(report.table(uses, console.width))
    console.print(f"[bold]{report.summary(total)}[/]")
    _tell_disagreements(prompts, results, console)
    if faults := report.faults(total, uses):
        raise DemoError("; ".join(faults))

    with console.status("drawing"):
        from examples.demo import picture

        sequence = picture.Sequence(
            rows=rows[0],
            pieces=[tokenizer.decode([t]) for t in answers[0].prompt + answers[0].token_ids],
            prompt_tokens=len(answers[0].prompt),
            chunk=CHUNK,
        )
        picture.draw(picture_file, uses, sequence, oracle.top_k, report.summary(total))
    console.print(f"[bold]picture[/]  {escape(str(picture_file))}")
    console.print(
        f"[bold green]PASSED[/]  every row is what transformers chooses "
        f"({time.monotonic() - began:.0f} s)"
    )


def _check_place(out: Path) -> None:
    """Make the output folder, and see that there is a vLLM and room on the disk."""
    # The repository's folder vllm/ also answers to the name, but as a namespace without file.
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        raise DemoError(f"{sys.executable} has no vllm: `make demo` installs it")
    if out.exists() and not out.is_dir():
        raise DemoError(f"{out} is a file; --out wants a folder")
    out.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(out).free
    if free < NEEDED_BYTES:
        raise DemoError(
            f"{out} has {free / 2**20:,.0f} MiB of free disk space; "
            f"the demo needs {NEEDED_BYTES / 2**20:,.0f} MiB"
        )


def _ask(
    checkpoint: Path,
    prompts: Sequence[text.Prompt],
    log: Path,
    env: dict[str, str],
    console: Console,
) -> list[Answer]:
    """Start a server, send it the prompts wave by wave, stop it. Answers in order."""
    args = [
        "--enable-return-routed-experts",
        "--enable-prefix-caching",
        "--enable-chunked-prefill",
        f"--max-num-batched-tokens={CHUNK}",
    ]
    answers: dict[str, Answer] = {}
    with contextlib.ExitStack() as running:
        with _Waiting(console, "starting vllm serve") as waiting:
            server = running.enter_context(
                Server(checkpoint, log, args, env, progress=waiting.progress)
            )
        version = json.loads(server.get("/version"))["version"]
        console.print(
            f"[bold]server[/]      vLLM {escape(str(version))}, ready after {waiting.elapsed:.0f} s"
            f", log in {escape(str(log))}"
        )
        began = time.monotonic()
        with console.status("asking"), ThreadPoolExecutor(8) as senders:
            for wave in sorted({p.wave for p in prompts}):
                sent = {
                    p.name: senders.submit(
                        server.generate, p.token_ids, max_tokens=p.max_tokens, **SAMPLING
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
        with console.status("stopping the server"):
            server.stop()
    return [answers[p.name] for p in prompts]


def _look_offline(checkpoint: Path, out: Path, env: dict[str, str], console: Console) -> str:
    """What `LLM.generate` returns in this vLLM, as the end of a sentence."""
    result = out / "offline.json"
    result.unlink(missing_ok=True)
    command = [sys.executable, "-m", "examples.demo.offline", str(checkpoint), str(result)]
    with (
        _Waiting(console, "asking LLM.generate offline") as waiting,
        Kept(command, out / "offline.log", env) as child,
    ):
        while child.poll() is None:
            waiting.progress(waiting.elapsed, child.last_line())
            time.sleep(0.1)
    if not result.exists():
        return f"offline LLM.generate failed: {child.first_error()} (log: {child.log})"
    found = json.loads(result.read_text())
    if found["shape"] is None:
        return "offline LLM.generate returns none either"
    rows, layers, top_k = found["shape"]
    what = f"{rows} rows of {layers} layers x {top_k} ids"
    if found["nonzero"]:
        return f"offline LLM.generate returns {what}, {found['nonzero']:,} of them not zero"
    return f"offline LLM.generate returns only zero rows ({what}, all 0)"


def _check(prompt: text.Prompt, answer: Answer, rows: Rows, oracle: Oracle) -> Comparison:
    """Compare one answer's rows with the oracle's route through the same tokens."""
    if answer.start != 0:
        raise DemoError(f"prompt {prompt.name!r}: rows start at {answer.start}, 0 was asked for")
    if answer.moe_layers != oracle.layers:
        raise DemoError(
            f"prompt {prompt.name!r}: moe_layers is {list(answer.moe_layers)}, "
            f"transformers has routers in {list(oracle.layers)}"
        )
    if rows.shape[-1] != oracle.top_k or len(answer.token_ids) != prompt.max_tokens:
        raise DemoError(
            f"prompt {prompt.name!r}: {len(answer.token_ids)} tokens with rows of shape "
            f"{rows.shape}; wanted {prompt.max_tokens} tokens, top-{oracle.top_k}"
        )
    routes = oracle.route(answer.prompt + answer.token_ids)
    try:
        return compare(rows, routes)
    except ValueError as e:
        raise DemoError(f"prompt {prompt.name!r}: {e}") from e


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
    position = len(prompt.token_ids) + prompt.max_tokens // 2  # amid the generated tokens
    layer = oracle.layers[-1]
    ids = rows[position, layer]
    old, new = int(ids[0]), next(e for e in range(oracle.num_experts) if e not in ids)
    ids[0] = new
    console.print(
        f"[bold yellow]corrupted[/]   on purpose: prompt {prompt.name!r}, position {position}, "
        f"layer {layer}: expert {old} became {new}"
    )
    return rows


class _Waiting:
    """Shows a long wait: a spinner on a terminal, now and then a line in a file."""

    EVERY_S = 10.0

    def __init__(self, console: Console, what: str) -> None:
        self._console, self._what = console, what
        self._status = console.status(what)
        self._began = self._told = time.monotonic()

    def __enter__(self) -> _Waiting:
        self._status.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._status.stop()
        self.ended = time.monotonic()

    @property
    def elapsed(self) -> float:
        """Seconds since the start."""
        return getattr(self, "ended", time.monotonic()) - self._began

    def progress(self, elapsed: float, line: str) -> None:
        """Show the seconds so far and the log's last line."""
        room = max(0, self._console.width - len(self._what) - 14)  # keep it on one line
        told = f"{self._what}  {elapsed:3.0f} s  [dim]{escape(line[:room])}[/]"
        self._status.update(told)
        if not self._console.is_terminal and time.monotonic() - self._told > self.EVERY_S:
            self._told = time.monotonic()
            self._console.print(told)


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m examples.demo",
        description="Serve a small random MoE model with the installed vLLM, get every "
        "token's experts over HTTP and compare them with Hugging Face transformers.",
    )
    parser.add_argument(
        "--out", type=Path, default=Path("build/demo"), help="folder for everything (%(default)s)"
    )
    way = parser.add_mutually_exclusive_group()
    way.add_argument(
        "--corrupt", action="store_true", help="change one captured id first; must then fail"
    )
    way.add_argument(
        "--pristine",
        action="store_true",
        help="say also what an unpatched vLLM returns offline; must fail",
    )
    return parser.parse_args(argv)


def _raise(number: int, frame: FrameType | None) -> NoReturn:
    raise _Signalled(number)


if __name__ == "__main__":
    sys.exit(main())
