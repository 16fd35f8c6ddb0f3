# SPDX-License-Identifier: Apache-2.0
"""The picture of what `overhead.py` measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from benchmarks.report import Comparison


def draw(found: Sequence[Comparison], out: Path) -> None:
    """A picture of what has an interval, load by load."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    decided = [c for c in found if c.seconds.percent is not None]
    figure, axis = plt.subplots(figsize=(8, 1 + 0.3 * len(decided)))
    colors = {load: f"C{i}" for i, load in enumerate({c.load: None for c in decided})}
    for y, c in enumerate(decided):
        percent, low, high = astuple(c.seconds)[1:]
        axis.errorbar(
            percent, y, xerr=[[percent - low], [high - percent]], fmt="o", color=colors[c.load]
        )
        if c.target is not None:
            axis.plot(c.target, y, "|", color="black", markersize=12)
    axis.set_yticks(range(len(decided)), [f"{c.load}: {c.label} / {c.reference}" for c in decided])
    axis.invert_yaxis()
    axis.axvline(0, color="grey", linewidth=1)
    axis.set_xlabel("% more time, 95 % interval; bars: what it may cost")
    axis.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(out, dpi=110)
