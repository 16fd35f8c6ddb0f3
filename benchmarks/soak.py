# SPDX-License-Identifier: Apache-2.0
"""A prefill and a decode engine behind the proxy for minutes, with clients that leave. No GPU.

    python -m benchmarks.soak --minutes 10 --out build/bench/soak [--on v0.33.0]

NIXL sends the KV between two `vllm serve` on loopback. Six clients ask the proxy for random
prompts, half of them with a prefix of another; answers are whole or streamed, with or without rows.
The rows of the prompt travel in `kv_transfer_params`. Clients leave one answer in four: in the
middle of its stream, or after a random time. One client in twelve sends the decode engine wrong
rows of a prompt, which must be refused. Each other answer must have the rows of all its positions,
and every tenth is compared with Hugging Face transformers. In the end no request and no KV block is
held, the engines' memory has not grown, and no process is left. DIR gets the record: `soak.json`,
`soak.md` and `soak.png`.

Exit status: 0 all held; 1 something did not, or no answer; the output says what.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from benchmarks.common import WORK, Failure, family, mebibytes, table
from examples import proxy
from examples.client import PATH, Completion, RoutedExpertsError, generate
from harness import disaggregated, oracle
from harness.checkpoint import make_checkpoint
from harness.lines import LINES, installed
from harness.server import ServerError

CLIENTS = 6
# One answer in so many is compared with the oracle.
CHECKED = 10


class Load:
    """The clients, and what became of their requests."""

    def __init__(self, pair: disaggregated.Pair, seconds: float) -> None:
        self.pair = pair
        self.url = pair.url
        self.end = time.monotonic() + seconds
        self.rng = np.random.default_rng(0)
        self.prefixes = [self._tokens(self.rng, 96) for _ in range(8)]
        self.finished = self.silent = self.left = self.refused = self.rows = 0
        self.checked: list[Completion] = []
        self.faults: list[str] = []
        self._lock = threading.Lock()

    def run(self) -> None:
        """Ask until the time is over and every kind of request has been answered."""
        with ThreadPoolExecutor(CLIENTS) as pool:
            for client in [pool.submit(self._client, number) for number in range(CLIENTS)]:
                client.result()

    def _client(self, number: int) -> None:
        rng = np.random.default_rng([1, number])
        for request in itertools.count(number):
            has_all_kinds = self.finished and self.left and self.refused
            is_over = time.monotonic() > self.end and has_all_kinds
            if is_over or len(self.faults) > 20:
                return
            try:
                if request % 12 == 6:
                    self._bring_wrong_rows(rng)
                else:
                    self._ask(rng, leaves=request % 4 == 0)
            except (RoutedExpertsError, ServerError, httpx.HTTPError, KeyError, ValueError) as e:
                with self._lock:
                    self.faults.append(f"{type(e).__name__}: {e}")

    def _ask(self, rng: np.random.Generator, leaves: bool) -> None:
        prompt = self._tokens(rng, int(rng.integers(1, 150)))
        if rng.random() < 0.5:
            prefix = self.prefixes[rng.integers(len(self.prefixes))]
            prompt = [*prefix[: rng.integers(1, len(prefix))], *prompt]
        sampling: dict[str, Any] = {
            "temperature": float(rng.integers(2)),
            "max_tokens": int(rng.integers(1, 60)),
            "ignore_eos": True,
        }
        stream = bool(rng.random() < 0.5)
        if leaves:
            self._leave(rng, {"token_ids": prompt, "sampling_params": sampling, "stream": stream})
            with self._lock:
                self.left += 1
        elif rng.random() < 0.2:
            sampling["extra_args"] = {"return_routed_experts": False}
            body = {"token_ids": prompt, "sampling_params": sampling}
            reply = httpx.post(self.url + PATH, json=body, trust_env=False, timeout=600)
            (choice,) = reply.raise_for_status().json()["choices"]
            if len(choice["token_ids"]) != sampling["max_tokens"] or choice.get("routed_experts"):
                raise ValueError(f"a silent answer has {sorted(choice)}")
            with self._lock:
                self.silent += 1
        else:
            # It has checked that no row is missing.
            (completion,) = generate(self.url, prompt, sampling, stream=stream)
            if completion.start or len(completion.token_ids) != sampling["max_tokens"]:
                raise ValueError(f"rows begin at {completion.start}, or tokens are missing")
            with self._lock:
                self.finished += 1
                self.rows += len(completion.rows)
                if self.finished % CHECKED == 0:
                    self.checked.append(completion)

    def _bring_wrong_rows(self, rng: np.random.Generator) -> None:
        """Send the decode engine rows that do not end with the prompt. It never fetches the KV."""
        prompt = self._tokens(rng, int(rng.integers(1, 150)))
        body: dict[str, Any] = {"token_ids": prompt, "sampling_params": {"max_tokens": 5}}
        prefilled = self.pair.prefill.post(PATH, proxy.prefill_body(PATH, body))
        body = proxy.decode_body(body, prefilled)
        body["kv_transfer_params"][proxy.PROMPT_ROWS]["routed_experts_start"] += 1
        reply = httpx.post(self.pair.decode.url + PATH, json=body, trust_env=False, timeout=600)
        if reply.status_code != 400 or proxy.PROMPT_ROWS not in reply.text:
            raise ValueError(f"wrong rows got status {reply.status_code}: {reply.text[:200]}")
        with self._lock:
            self.refused += 1

    def _leave(self, rng: np.random.Generator, body: dict[str, Any]) -> None:
        """Close the connection in the middle of a long answer, or before it."""
        body["sampling_params"]["max_tokens"] = 200
        timeout = 600 if body["stream"] else float(rng.uniform(0.02, 1))
        request: dict[str, Any] = {"json": body, "trust_env": False, "timeout": timeout}
        with suppress(httpx.ReadTimeout), httpx.stream("POST", self.url + PATH, **request) as reply:
            reply.raise_for_status()
            for _, _ in zip(reply.iter_lines(), range(rng.integers(1, 60)), strict=False):
                pass

    def _tokens(self, rng: np.random.Generator, count: int) -> list[int]:
        return [int(token) for token in rng.integers(4, 700, count)]


def soak(pair: disaggregated.Pair, seconds: float) -> tuple[Load, list[dict[str, Any]]]:
    """Put a pair of engines under load, and wait until they hold nothing.

    Returns:
        The load, and a line for each second of it.

    Raises:
        ServerError: an engine still holds requests or KV.
    """
    load = Load(pair, seconds)
    servers = (pair.prefill, pair.decode)
    lines: list[dict[str, Any]] = []
    with ThreadPoolExecutor(1) as pool:
        began, running = time.monotonic(), pool.submit(load.run)
        while not running.done():
            lines.append(
                {
                    "t": round(time.monotonic() - began, 1),
                    "answers": load.finished + load.silent,
                    "left": load.left,
                    "mib": [mebibytes(family(server.pid)) for server in servers],
                }
            )
            time.sleep(1)
        running.result()
    for server in servers:
        disaggregated.wait_until_idle(server)
    return load, lines


def growth(lines: Sequence[dict[str, Any]]) -> Iterator[tuple[int, int]]:
    """Of each engine: its memory in MiB after a fifth of the time, and in the last fifth."""
    fifth = len(lines) // 5 or 1
    for number in range(2):
        mib = [line["mib"][number] for line in lines]
        yield int(statistics.median(mib[fifth : 2 * fifth])), int(statistics.median(mib[-fifth:]))


def limit(mib: int) -> float:
    """Memory in MiB above which an engine that had so much has grown. oneDNN's cache takes up to
    14 MiB: 1,024 matmul primitives, one for each weight's shape and number of tokens in a step."""
    return 1.02 * mib + 8


def draw(lines: Sequence[dict[str, Any]], out: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (top, bottom) = plt.subplots(2, figsize=(8, 6), sharex=True)
    t = [line["t"] for line in lines]
    for name in ("answers", "left"):
        counts = [line[name] for line in lines]
        # A mean of ten seconds is easier to read than single counts.
        rate = [(b - a) / 10 for a, b in zip(counts, counts[10:], strict=False)]
        top.plot(t[: len(rate)], rate, label=name)
    top.set_ylabel("requests/s, mean of 10 s")
    for number, name in enumerate(("prefill engine", "decode engine")):
        mib = [line["mib"][number] for line in lines]
        bottom.plot(t, [m - mib[0] for m in mib], label=f"{name}, {mib[0]:,} MiB at first")
    bottom.axhline(limit(mib[0]) - mib[0], color="grey", linestyle=":", label="counts as growth")
    bottom.set_ylabel("memory above the first second's, MiB")
    bottom.set_xlabel("s")
    top.set_ylim(bottom=0)
    for axis in (top, bottom):
        axis.legend(fontsize=8)
        axis.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(out, dpi=110)


def run(minutes: float, out: Path, line: str) -> None:
    """Start everything, soak, stop everything, and write the record.

    Raises:
        Failure: something did not hold.
        ServerError: an engine did not start, or still holds something at the end.
    """
    out.mkdir(parents=True, exist_ok=True)
    model = make_checkpoint(out / "checkpoint")
    with disaggregated.running(model, out, disaggregated.nixl, line) as pair:
        processes = [*family(pair.prefill.pid), *family(pair.decode.pid)]
        load, lines = soak(pair, 60 * minutes)
        version = json.loads(pair.decode.get("/version"))["version"]
    left = [process for process in processes if process.is_running()]
    total = oracle.Comparison()
    for completion in load.checked:
        routes = oracle.route(model, [*completion.prompt, *completion.token_ids])
        total += oracle.compare(completion.rows, routes, completion.start)
    memory = list(growth(lines))
    report = [
        "# A soak through the prefill/decode proxy\n",
        f"`python -m benchmarks.soak --minutes {minutes:g}` on {os.cpu_count()} cores, vLLM "
        f"{version}; NIXL over loopback, {CLIENTS} clients, which leave one answer in four.\n",
        table(
            ["What", "How many"],
            [
                ["Answers with rows, none missing", f"{load.finished:,} ({load.rows:,} rows)"],
                ["Answers without rows, as asked", f"{load.silent:,}"],
                ["Clients that left", f"{load.left:,}"],
                ["Wrong rows of a prompt, refused", f"{load.refused:,}"],
                ["Faults", f"{len(load.faults)}"],
                [
                    "Rows of every tenth answer that are transformers'",
                    f"{total.agree:,} of {total.rows:,}",
                ],
                *(
                    [
                        f"Memory of the {name} engine, second and last fifth of the time",
                        f"{a:,} and {b:,} MiB",
                    ]
                    for name, (a, b) in zip(("prefill", "decode"), memory, strict=True)
                ),
                ["Requests and KV blocks held at the end", "0"],
                ["Processes left", f"{len(left)}"],
            ],
        ),
        "![Requests per second, and memory of both engines](soak.png)",
    ]
    (out / "soak.json").write_text(json.dumps(lines) + "\n")
    (out / "soak.md").write_text("\n".join(report) + "\n")
    draw(lines, out / "soak.png")
    print("\n".join(report))
    if load.faults:
        raise Failure(f"{len(load.faults)} faults: {load.faults[0]}")
    if total.disagreements or not total.rows:
        raise Failure(f"{total.agree} of {total.rows} rows are right: {total.disagreements[:1]}")
    if any(last > limit(first) for first, last in memory):
        raise Failure(f"memory grew, in MiB: {memory}")
    if left:
        raise Failure(f"processes are left: {left}")


def main(argv: Sequence[str] | None = None) -> int:
    """Run with command-line arguments; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.soak", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--minutes", type=float, default=10, help="of load (%(default)g)")
    parser.add_argument(
        "--out", type=Path, default=WORK / "soak", help="folder for everything (%(default)s)"
    )
    parser.add_argument(
        "--on", choices=LINES, default=installed(), help="line of the installed vLLM (%(default)s)"
    )
    args = parser.parse_args(argv)
    try:
        run(args.minutes, args.out, args.on)
    except (Failure, ServerError) as e:
        print(f"error: {e}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
