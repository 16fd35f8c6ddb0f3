# SPDX-License-Identifier: Apache-2.0
"""The result of the comparison, as a table on the terminal and as a record."""

from __future__ import annotations

import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version

import numpy as np
from rich.table import Table

from benchmarks.common import table as markdown
from demos.replay.mismatch import RESAMPLES, Mismatch
from demos.replay.trainers import Trained
from examples.client import Completion


@dataclass(frozen=True)
class Result:
    """One run: what was sampled, and the mismatch of every trainer.

    Attributes:
        completions: of the server, in float32.
        router_std: standard deviation of the routers' weights.
        control: the plain trainer in float32 with its own routes.
        trained: every trainer, the plain one first.
    """

    completions: Sequence[Completion]
    router_std: float
    control: Mismatch
    trained: Sequence[Trained]

    @property
    def first(self) -> Trained:
        return self.trained[0]


# With float32 on both sides only rounding is left: less than this part of bfloat16's distance.
MAX_CONTROL = 0.1
# Two float32 computations of equal gradients differ by rounding alone.
MAX_GRADIENTS = 1e-4

WAYS = ("", "float32, own routes", "bfloat16, own routes", "bfloat16, server's routes")
TRAINERS = (
    "trainer",
    "own routes",
    "server's routes",
    "times nearer",
    "gradients, own routes",
    "gradients, replayed",
)

LINES: dict[str, Callable[[Mismatch], str]] = {
    "mean distance": lambda m: f"{m.mean:#.2g}",
    "median distance": lambda m: f"{np.median(np.abs(m.deltas)):#.2g}",
    "greatest distance": lambda m: f"{np.abs(m.deltas).max():#.2g}",
    "KL divergence (k3), nats": lambda m: f"{m.k3:#.2g}",
    "importance ratio": lambda m: "{:.3f} to {:.3f}".format(*m.ratios),
    "tokens whose own choice differs": lambda m: f"{100 * m.tokens:.1f} %",
    "decisions that differ": lambda m: f"{100 * m.decisions:.2f} %",
}


def table(title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """A table on the terminal, of `ways` or `trainers`."""
    made = Table(title=title, title_style="bold", title_justify="left")
    for number, heading in enumerate(head):
        made.add_column(heading, justify="right" if number else "left")
    for cells in rows:
        made.add_row(*cells)
    return made


def ways(result: Result) -> tuple[Sequence[str], list[list[str]]]:
    """Head and rows of a table that has a column for each way to compute."""
    each = (result.control, result.first.plain, result.first.replayed)
    return WAYS, [[label, *map(show, each)] for label, show in LINES.items()]


def trainers(result: Result) -> tuple[Sequence[str], list[list[str]]]:
    """Head and rows of a table that has the distances of each trainer."""

    def mean(way: Mismatch) -> str:
        low, high = way.interval
        return f"{way.mean:#.2g} ({low:#.2g} to {high:#.2g})"

    return TRAINERS, [
        [
            t.name,
            mean(t.plain),
            mean(t.replayed),
            str(t.gain),
            f"{t.own_gradients:#.2g}",
            f"{t.gradients:.0e}",
        ]
        for t in result.trained
    ]


def verdict(result: Result) -> str:
    """The result in one sentence."""
    return (
        f"replay brings the mean distance from {result.first.plain.mean:#.2g} to "
        f"{result.first.replayed.mean:#.2g}: {result.first.gain} times nearer, 95 % interval"
    )


def faults(result: Result) -> list[str]:
    """The reasons why the comparison fails, one clause each; empty if it passes."""
    found = []
    if result.control.mean > MAX_CONTROL * result.first.replayed.mean:
        found.append(f"even in float32 the mean distance is {result.control.mean:.2g}")
    for trainer in result.trained:
        if trainer.gain.low <= 1:
            found.append(f"replay in {trainer.name} is not clearly nearer: {trainer.gain} times")
        if not trainer.gradients < MAX_GRADIENTS:
            found.append(
                f"the gradients of a replay in {trainer.name} differ by {trainer.gradients:.1g} "
                f"from those of a run without replay that takes equal routes"
            )
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
        markdown(*ways(result)),
        f"{verdict(result)[0].upper()}{verdict(result)[1:]} (bootstrap over completions, "
        f"{RESAMPLES:,} resamples).",
        "",
        "Every trainer, with 95 % intervals of the mean distance. Gradients: float32, the relative "
        "distance from those of a run without replay that takes equal routes (the routers' logits "
        "of all other experts at minus infinity; routes that the model would not select).",
        "",
        markdown(*trainers(result)),
    ]
    return "\n".join(lines)
