# SPDX-License-Identifier: Apache-2.0
"""Use of the experts per layer, the table and the verdict."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from rich.table import Table
from rich.text import Text

from harness.oracle import Comparison

MIN_ROWS = 1_000
MIN_SHARE_SEEN = 0.75
MAX_TIE_SHARE = 0.001

_BARS = "▁▂▃▄▅▆▇█"


@dataclass(frozen=True)
class LayerUse:
    """How one MoE layer used its experts.

    Attributes:
        layer: decoder layer.
        counts: (E,) int, how many tokens chose each expert.
        tokens: tokens captured.
        nbytes: bytes these rows took on the wire at this layer, before base64.
    """

    layer: int
    counts: npt.NDArray[np.int64]
    tokens: int
    nbytes: int

    @property
    def share(self) -> npt.NDArray[np.float64]:
        """(E,) each expert's part of the layer's choices; sums to 1."""
        return self.counts / max(1, int(self.counts.sum()))

    @property
    def entropy(self) -> float:
        """Of `share`, in bits: log2(E) if all experts are used alike, 0 if only one is."""
        p = self.share[self.share > 0]
        return float(-(p * np.log2(p)).sum()) + 0.0

    @property
    def seen(self) -> float:
        """Part of the experts that occur, 0 to 1."""
        return float((self.counts > 0).mean())


def layer_uses(
    rows: Iterable[npt.NDArray[np.integer[Any]]], layers: Sequence[int], experts: int
) -> list[LayerUse]:
    """Count the use of every MoE layer.

    Args:
        rows: arrays of shape (R, L, K), one per answer.
        layers: the decoder layers that route.
        experts: E; ids beyond it are not counted (`oracle.compare` refuses them).
    """
    joined = np.concatenate(list(rows))
    return [
        LayerUse(
            layer,
            np.bincount(joined[:, layer].ravel(), minlength=experts)[:experts],
            len(joined),
            joined[:, layer].nbytes,
        )
        for layer in layers
    ]


def table(uses: Sequence[LayerUse], width: int) -> Table:
    """The table the demo prints, one line per MoE layer.

    Args:
        uses: one per layer.
        width: columns of the terminal; bars are drawn where there is room.
    """
    experts = len(uses[0].counts)
    bars = experts <= 32 and width >= 84 + experts
    title = f"Use of the experts (entropy is at most {np.log2(experts):.2f} bits)"
    made = Table(title=title, title_style="bold", title_justify="left")
    made.add_column("layer", justify="right")
    made.add_column("most used experts", no_wrap=True)
    if bars:
        made.add_column(f"use of 0 … {experts - 1}", no_wrap=True)
    made.add_column("entropy\n(bits)", justify="right")
    made.add_column("experts\nseen", justify="right")
    made.add_column("tokens\ncaptured", justify="right")
    made.add_column("bytes", justify="right")
    for use in uses:
        top = np.argsort(-use.share, kind="stable")[:3]
        line = [
            str(use.layer),
            "  ".join(f"{e:>2} {use.share[e]:5.1%}" for e in top),
            *([_bars(use.share)] if bars else []),
            f"{use.entropy:.2f}",
            f"{int((use.counts > 0).sum())} of {experts}",
            f"{use.tokens:,}",
            f"{use.nbytes:,}",
        ]
        made.add_row(*(Text(cell) for cell in line))
    return made


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


def _bars(share: npt.NDArray[np.float64]) -> str:
    """One character per expert, its height the share; a blank for an unused one."""
    top = max(float(share.max()), 1e-12)
    return "".join(_BARS[min(7, int(8 * s / top))] if s > 0 else " " for s in share)
