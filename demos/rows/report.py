# SPDX-License-Identifier: Apache-2.0
"""Use of the experts per layer, and the verdict."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from harness.oracle import Comparison

MIN_ROWS = 1_000
MIN_SHARE_SEEN = 0.75
MAX_TIE_SHARE = 0.001


@dataclass(frozen=True)
class LayerUse:
    """How one MoE layer used its experts."""

    layer: int
    counts: npt.NDArray[np.int64]  # (E,) tokens that chose each expert
    tokens: int  # captured

    @property
    def share(self) -> npt.NDArray[np.float64]:
        """(E,) each expert's part of the layer's choices; sums to 1."""
        return self.counts / max(1, int(self.counts.sum()))

    @property
    def seen(self) -> float:
        """Part of the experts that occur, 0 to 1."""
        return float((self.counts > 0).mean())


def layer_uses(
    rows: Iterable[npt.NDArray[np.integer[Any]]], layers: Sequence[int], experts: int
) -> list[LayerUse]:
    """Count the use of every MoE layer, over (R, L, K) rows of each answer."""
    joined = np.concatenate(list(rows))
    return [
        LayerUse(
            layer,
            np.bincount(joined[:, layer].ravel(), minlength=experts)[:experts],
            len(joined),
        )
        for layer in layers
    ]


def summary(comparison: Comparison) -> str:
    """`N of N rows agree, T ties of M decisions`."""
    c = comparison
    return (
        f"{c.agree:,} of {c.rows:,} rows agree, "
        f"{c.ties:,} {'tie' if c.ties == 1 else 'ties'} of {c.decisions:,} decisions"
    )


def faults(comparison: Comparison, uses: Sequence[LayerUse]) -> list[str]:
    """The reasons why the demo fails, one clause each; empty if it passes."""
    c, found = comparison, []
    if c.agree < c.rows:
        bad, first = c.rows - c.agree, c.disagreements[0]
        verb = "disagrees" if bad == 1 else "disagree"
        found.append(
            f"{bad:,} of {c.rows:,} rows {verb} with the oracle, first at position "
            f"{first.position} in layer {first.layer}"
        )
    if c.rows <= MIN_ROWS:
        found.append(f"only {c.rows:,} rows were captured, more than {MIN_ROWS:,} are wanted")
    if c.tie_share > MAX_TIE_SHARE:
        found.append(
            f"{c.ties:,} of {c.decisions:,} decisions are ties ({c.tie_share:.2%}), "
            f"at most {MAX_TIE_SHARE:.1%} may be"
        )
    found += [
        f"only {use.seen:.0%} of layer {use.layer}'s experts occur, "
        f"at least {MIN_SHARE_SEEN:.0%} must"
        for use in uses
        if use.seen < MIN_SHARE_SEEN
    ]
    return found
