# SPDX-License-Identifier: Apache-2.0
"""The picture of the demo: use of the experts, and one sequence's routes over its tokens."""

from __future__ import annotations

import collections.abc
import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # no display needed

import matplotlib.pyplot as plt
import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap, ListedColormap, to_rgb

from demos.rows.report import LayerUse

INK = "#1f2933"
SOFT = "#66727f"
FAINT = "#e7ebef"
PAPER = "#ffffff"
# Okabe and Ito's palette, which colour-blind readers can tell apart too.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#AA4499", "#56B4E9", "#E69F00")
STYLE = {
    "font.family": "DejaVu Sans",
    "font.size": 10,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": SOFT,
    "xtick.color": SOFT,
    "ytick.color": SOFT,
}


@dataclass(frozen=True)
class Sequence:
    """One sequence to draw: (tokens, layers, top-k) rows, the prompt, and its chunks' length."""

    rows: npt.NDArray[np.integer[Any]]
    text: str
    prompt_tokens: int
    chunk: int


def draw(
    path: Path,
    uses: collections.abc.Sequence[LayerUse],
    sequence: Sequence,
    top_k: int,
    verdict: str,
) -> None:
    """Write the picture as a PNG file: use of each layer, and a sequence's routes."""
    layers, experts = len(uses), len(uses[0].counts)
    with plt.rc_context(STYLE):
        size = (15.0, 2.8 + 2.06 * layers)
        figure = plt.figure(figsize=size, dpi=120, facecolor=PAPER, layout="constrained")
        figure.get_layout_engine().set(h_pad=0.04, w_pad=0.1)
        tall = [0.56 * layers, *[1.5] * layers]
        heat, *strips = figure.subplots(layers + 1, height_ratios=tall)
        figure.suptitle(
            f"Each token picks {top_k} of {experts} experts, in every layer anew\n",
            x=0.005, ha="left", size=21, weight="bold",
        )  # fmt: skip
        figure.text(
            0.005, 1 - 0.62 / size[1], "Routing of a small random Qwen3-MoE, returned by vLLM with "
            f"the tokens. Checked against Hugging Face transformers: {verdict}.",
            size=11, color=SOFT, va="center",
        )  # fmt: skip
        _heat_map(heat, uses)
        for axis, use, colour in zip(strips, uses, itertools.cycle(COLOURS), strict=False):
            _strip(axis, use.layer, experts, sequence, colour, last=use is uses[-1])
        _mark_steps(strips[0], sequence)
        figure.savefig(path, facecolor=PAPER)
        plt.close(figure)


def _heat_map(axis: Axes, uses: collections.abc.Sequence[LayerUse]) -> None:
    """Layers down, experts across, the share of the layer's choices as colour and number."""
    share = 100 * np.stack([u.share for u in uses])
    experts = share.shape[1]
    colours = LinearSegmentedColormap.from_list(
        "use", ["#f4f7fa", "#bcd3e6", "#5a95c4", "#15598f", "#082f55"]
    )
    top = share.max()
    axis.pcolormesh(
        np.arange(experts + 1) - 0.5, np.arange(len(uses) + 1) - 0.5, share,
        cmap=colours, vmin=0, vmax=top, edgecolors=PAPER, linewidth=2.5,
    )  # fmt: skip
    if experts <= 32:
        for (row, expert), value in np.ndenumerate(share):
            axis.text(
                expert, row, f"{value:.1f}", ha="center", va="center", size=9.5,
                color=PAPER if value > 0.5 * top else INK,
            )  # fmt: skip
    axis.set_ylim(len(uses) - 0.5, -0.5)
    axis.set_yticks(range(len(uses)), [f"layer {u.layer}" for u in uses])
    axis.set_xticks(range(0, experts, max(1, experts // 16)))
    axis.tick_params(length=0)
    axis.spines[:].set_visible(False)
    axis.set_xlabel("expert", labelpad=3)
    axis.set_title(
        f"All {uses[0].tokens:,} tokens: percent of a layer's choices that went to each expert",
        loc="left", size=12.5, weight="bold", pad=9,
    )  # fmt: skip
    axis.text(
        1, 1.04, f"an even share would be {100 / experts:.2f}", ha="right", va="bottom", color=SOFT,
        transform=axis.transAxes,
    )  # fmt: skip


def _strip(
    axis: Axes, layer: int, experts: int, sequence: Sequence, colour: str, last: bool
) -> None:
    """One layer's choices over the sequence: experts up, token positions to the right."""
    rows = sequence.rows[:, layer]
    chosen = np.zeros((experts, len(rows)))
    chosen[rows.T, np.arange(len(rows))] = 1
    axis.pcolormesh(
        np.arange(len(rows) + 1) - 0.5, np.arange(experts + 1) - 0.5, chosen,
        cmap=ListedColormap([_mix(colour, 0.07), colour]), edgecolors=PAPER, linewidth=0.35,
    )  # fmt: skip
    axis.set_xlim(-0.5, len(rows) - 0.5)
    axis.set_ylim(-0.5, experts - 0.5)
    axis.set_yticks(sorted({0, experts // 3, 2 * experts // 3, experts - 1}))
    axis.set_ylabel(f"layer {layer}\nexpert", color=colour, weight="bold", labelpad=6)
    axis.spines[:].set_visible(False)
    axis.tick_params(length=0, labelbottom=last)
    axis.set_xticks(range(0, len(rows), 16))
    for position in _steps(sequence)[1:-1]:
        final = position == sequence.prompt_tokens
        axis.axvline(
            position - 0.5, color=INK, linewidth=1.6 if final else 1.0,
            linestyle="-" if final else (0, (4, 3)),
        )  # fmt: skip
    if last:
        axis.set_xlabel("position of the token in its sequence")


def _mark_steps(axis: Axes, sequence: Sequence) -> None:
    """Name the prefill chunks and the generated part above the top strip."""
    steps = _steps(sequence)
    for number, (start, stop) in enumerate(itertools.pairwise(steps), start=1):
        generated = start >= sequence.prompt_tokens
        axis.annotate(
            "generated, one step each" if generated else f"prompt, chunk {number}",
            ((start + stop - 1) / 2, 1.03), xycoords=("data", "axes fraction"),
            ha="center", va="bottom", color=INK if generated else SOFT,
            weight="bold" if generated else "normal",
        )  # fmt: skip
    opening = sequence.text[:60].rsplit(" ", 1)[0]
    axis.set_title(
        f"One sequence, token by token: “{opening} …”", loc="left", size=12.5, weight="bold", pad=24
    )


def _steps(sequence: Sequence) -> list[int]:
    """Where a prefill step begins, then where generation begins, then the end."""
    prompt = sequence.prompt_tokens
    return [*range(0, prompt, sequence.chunk), prompt, len(sequence.rows)]


def _mix(colour: str, part: float) -> tuple[float, float, float]:
    """`colour` thinned with white; `part` of it stays."""
    red, green, blue = (1 - part * (1 - c) for c in to_rgb(colour))
    return red, green, blue
