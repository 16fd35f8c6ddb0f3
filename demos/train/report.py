# SPDX-License-Identifier: Apache-2.0
"""What the steps of both ways show, as a table on the terminal and as a record."""

from __future__ import annotations

import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version

import numpy as np
from rich.table import Table

from benchmarks.common import table as markdown
from demos.train import ARMS


@dataclass(frozen=True)
class Step:
    """One rollout, and the trainer's log-probs of its tokens before the optimizer step. A decision
    is one token in one layer."""

    arm: str  # key of `ARMS`
    step: int  # optimizer steps before
    tokens: int
    mean: float  # of |the trainer's log-prob less the server's|
    greatest: float
    k3: float  # estimate of the KL divergence, in nats
    outside: float  # share of tokens whose importance ratio is below 0.5 or above 2
    differs: float  # share of decisions in which the trainer itself would take other experts
    rows: int  # compared with `transformers`
    wrong: int  # how many differ
    first: str
    seconds: Mapping[str, float]  # by part of the step


FIGURES: dict[str, Callable[[Step], str]] = {
    "mean": lambda s: f"{s.mean:.4f}",
    "greatest": lambda s: f"{s.greatest:.3f}",
    "KL (k3)": lambda s: f"{s.k3:.1e}",
    "out of 0.5–2": lambda s: f"{100 * s.outside:.2f} %",
    "own router": lambda s: f"{100 * s.differs:.2f} %",
    "wrong rows": lambda s: f"{s.wrong:,} of {s.rows:,}",
}
HEAD = ("step", "way", *FIGURES)


def rows(steps: Sequence[Step]) -> list[list[str]]:
    """The lines of the table, both ways of a step together."""
    ordered = sorted(steps, key=lambda s: (s.step, [*ARMS].index(s.arm)))
    return [
        [str(s.step + 1), ARMS[s.arm], *(show(s) for show in FIGURES.values())] for s in ordered
    ]


def table(steps: Sequence[Step]) -> Table:
    """The table on the terminal."""
    title = "|Trainer's log-prob less the server's| at each optimizer step; own router: "
    title += "decisions in which it differs from the row"
    made = Table(title=title, title_style="bold", title_justify="left")
    for number, heading in enumerate(HEAD):
        made.add_column(heading, justify="left" if number == 1 else "right")
    for cells in rows(steps):
        made.add_row(*cells)
    return made


def line(step: Step) -> str:
    """One step, when it is measured."""
    spent = ", ".join(f"{part} {s:.0f} s" for part, s in step.seconds.items())
    wrong = f", [bold red]{step.wrong:,} rows are wrong[/]" if step.wrong else ""
    return (
        f"[bold]{ARMS[step.arm]}[/], step {step.step + 1}: mean difference {step.mean:.4f}, "
        f"greatest {step.greatest:.3f}{wrong}  [dim]{spent}[/]"
    )


def means(steps: Sequence[Step]) -> dict[str, float]:
    """By way, the mean difference over all its steps."""
    return {arm: float(np.mean([s.mean for s in steps if s.arm == arm])) for arm in ARMS}


def verdict(steps: Sequence[Step]) -> str:
    """The result in one sentence."""
    mean = means(steps)
    return (
        f"all {sum(s.rows for s in steps):,} rows are those of transformers with the weights that "
        f"were sent; replay brings the mean difference from {mean['own']:.4f} to "
        f"{mean['replay']:.4f}"
    )


def faults(steps: Sequence[Step], wanted: int) -> list[str]:
    """The reasons why the demo fails, one clause each; empty if it passes."""
    if len(steps) != wanted * len(ARMS):
        return [f"{len(steps)} of {wanted * len(ARMS)} steps were measured"]
    found = [
        f"{s.wrong:,} of {s.rows:,} rows are not those of the weights at step {s.step + 1} "
        f"{ARMS[s.arm]}: {s.first}"
        for s in steps
        if s.wrong
    ][:1]
    mean = means(steps)
    if not mean["replay"] < mean["own"]:
        found.append(
            f"the mean difference with replay is {mean['replay']:.4f}, without it {mean['own']:.4f}"
        )
    return found


def record(steps: Sequence[Step]) -> str:
    """Markdown: what was run, with what, and what came out."""
    return "\n".join(
        [
            f"vLLM {version('vllm')}, Python {platform.python_version()}; "
            f"{steps[0].tokens if steps else 0:,} sampled tokens at each step. Mean and greatest "
            "|the trainer's log-prob less the server's|; KL (k3) in nats; the share of tokens with "
            "an importance ratio outside 0.5 to 2; the share of decisions in which the trainer's "
            "own router differs from the row; rows that are not those of the weights.",
            "",
            markdown(HEAD, rows(steps)),
        ]
    )
