# SPDX-License-Identifier: Apache-2.0
"""The result of the comparison, as a table on the terminal and as a record."""

from __future__ import annotations

import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import version

import numpy as np
from rich.table import Table

from benchmarks.common import table as markdown
from demos.replay.mismatch import RESAMPLES, Gain, Mismatch, nearer
from examples.client import Completion


@dataclass(frozen=True)
class Result:
    """One run."""

    completions: Sequence[Completion]  # of the server, in float32
    router_std: float
    control: Mismatch  # the trainer in float32 with its own routes
    plain: Mismatch  # in bfloat16, with its own routes
    replayed: Mismatch  # in bfloat16, with the server's

    @cached_property
    def gain(self) -> Gain:
        """How many times nearer `replayed` is."""
        return nearer(self.plain, self.replayed)


# With float32 on both sides only rounding is left: less than this part of bfloat16's distance.
MAX_CONTROL = 0.1

WAYS = ("", "float32, own routes", "bfloat16, own routes", "bfloat16, server's routes")
LINES: dict[str, Callable[[Mismatch], str]] = {
    "mean distance": lambda m: f"{m.mean:#.2g}",
    "median distance": lambda m: f"{np.median(np.abs(m.deltas)):#.2g}",
    "greatest distance": lambda m: f"{np.abs(m.deltas).max():#.2g}",
    "KL divergence (k3), nats": lambda m: f"{m.k3:#.2g}",
    "importance ratio": lambda m: "{:.3f} to {:.3f}".format(*m.ratios),
    "tokens whose own choice differs": lambda m: f"{100 * m.tokens:.1f} %",
    "decisions that differ": lambda m: f"{100 * m.decisions:.2f} %",
}


def table(result: Result) -> Table:
    """A table on the terminal."""
    title = "Distance of a trainer's log-probs from the server's, "
    title += f"{result.control.deltas.size:,} sampled tokens"
    made = Table(title=title, title_style="bold", title_justify="left")
    for number, heading in enumerate(WAYS):
        made.add_column(heading, justify="right" if number else "left")
    for cells in ways(result):
        made.add_row(*cells)
    return made


def ways(result: Result) -> list[list[str]]:
    """Rows of a table that has a column for each way to compute."""
    each = (result.control, result.plain, result.replayed)
    return [[label, *map(show, each)] for label, show in LINES.items()]


def verdict(result: Result) -> str:
    """The result in one sentence."""
    return (
        f"replay brings the mean distance from {result.plain.mean:#.2g} to "
        f"{result.replayed.mean:#.2g}: {result.gain} times nearer, 95 % interval"
    )


def faults(result: Result) -> list[str]:
    """The reasons why the comparison fails, one clause each; empty if it passes."""
    found = []
    if result.control.mean > MAX_CONTROL * result.replayed.mean:
        found.append(f"even in float32 the mean distance is {result.control.mean:.2g}")
    if result.gain.low <= 1:
        found.append(f"replay is not clearly nearer: {result.gain} times")
    return found


def record(result: Result) -> str:
    """Markdown: what was run, with what, and what came out."""
    completions = result.completions
    rows = sum(len(c.rows) for c in completions)
    layers, top_k = completions[0].rows.shape[1:]
    versions = ", ".join(f"{p} {version(p)}" for p in ("vllm", "transformers", "torch", "numpy"))
    lines = [
        f"{versions}, Python {platform.python_version()}.",
        f"{len(completions)} completions, {result.control.deltas.size:,} sampled tokens, "
        f"{rows:,} rows of {layers} layers × top-{top_k}; routers' weights of standard deviation "
        f"{result.router_std:g}.",
        "",
        markdown(WAYS, ways(result)),
        f"{verdict(result)[0].upper()}{verdict(result)[1:]} (bootstrap over completions, "
        f"{RESAMPLES:,} resamples).",
        "",
    ]
    return "\n".join(lines)
