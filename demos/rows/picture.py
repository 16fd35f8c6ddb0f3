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
CLOSE_UP = 26  # tokens whose text is shown


@dataclass(frozen=True)
class Sequence:
    """One sequence to draw: P prompt and O returned tokens.

    Attributes:
        rows: (P + O - 1, L, K) integer, its rows from position 0.
        pieces: P + O texts, one per token.
        prompt_tokens: P.
        chunk: tokens per prefill step.
    """

    rows: npt.NDArray[np.integer[Any]]
    pieces: collections.abc.Sequence[str]
    prompt_tokens: int
    chunk: int


def draw(
    path: Path,
    uses: collections.abc.Sequence[LayerUse],
    sequence: Sequence,
    top_k: int,
    verdict: str,
) -> None:
    """Write the picture as a PNG file.

    Args:
        path: the file; its folder exists.
        uses: one per MoE layer, over all captured tokens.
        sequence: whose routes to show.
        top_k: experts per token and layer.
        verdict: one line for the subtitle.
    """
    layers, experts = len(uses), len(uses[0].counts)
    width = 15.0
    left = 0.065
    right = 0.975
    # Heights in inches, from the top: title, heat map, strips, close-up; gaps between.
    title = 1.35
    heat = 0.56 * layers
    strips = 1.5 * layers
    close = 0.57 * layers
    gap, foot = 1.15, 0.3
    height = title + heat + gap + strips + gap + close + foot
    with plt.rc_context(STYLE):
        figure = plt.figure(figsize=(width, height), dpi=120, facecolor=PAPER)

        def axes(top: float, tall: float) -> Axes:
            """Axes over the whole width, `top` inches from the top, `tall` inches high."""
            box = (left, 1 - (top + tall) / height, right - left, tall / height)
            return figure.add_axes(box)

        figure.text(
            left, 1 - 0.4 / height, f"Each token picks {top_k} of {experts} experts, "
            f"in every layer", size=21, weight="bold", va="center",
        )  # fmt: skip
        figure.text(
            left, 1 - 0.79 / height, f"Routing of a small random Qwen3-MoE, returned by vLLM "
            f"with the tokens. Checked against Hugging Face transformers: {verdict}.",
            size=11, color=SOFT, va="center",
        )  # fmt: skip
        _heat_map(axes(title, heat), uses)
        top = title + heat + gap
        each = strips / layers
        for i, use in enumerate(uses):
            axis = axes(top + i * each, each - 0.14)
            colour = COLOURS[i % len(COLOURS)]
            _strip(axis, use.layer, experts, sequence, colour, last=i == layers - 1)
            if i == 0:
                _mark_steps(axis, sequence)
        _close_up(axes(top + strips + gap, close), [u.layer for u in uses], experts, sequence)
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
    opening = "".join(sequence.pieces[: sequence.prompt_tokens])[:60].rsplit(" ", 1)[0]
    axis.set_title(
        f"One sequence, token by token: “{opening} …”", loc="left", size=12.5, weight="bold", pad=24
    )


def _close_up(
    axis: Axes, layers: collections.abc.Sequence[int], experts: int, sequence: Sequence
) -> None:
    """The first tokens with their text; each square holds a layer's experts, chosen ones lit."""
    count = min(CLOSE_UP, len(sequence.rows))
    side = int(np.ceil(np.sqrt(experts)))
    pitch = side + 1  # a blank line between squares
    field = np.full((pitch * len(layers), pitch * count), np.nan)
    colours = []
    for i, layer in enumerate(layers):
        colours += [_mix(COLOURS[i % len(COLOURS)], 0.1), to_rgb(COLOURS[i % len(COLOURS)])]
        for token in range(count):
            square = np.full(side * side, np.nan)
            square[:experts] = 2 * i
            square[sequence.rows[token, layer]] = 2 * i + 1
            field[i * pitch : i * pitch + side, token * pitch : token * pitch + side] = (
                square.reshape(side, side)
            )
    axis.pcolormesh(
        field, cmap=ListedColormap(colours), vmin=-0.5, vmax=len(colours) - 0.5,
        edgecolors=PAPER, linewidth=0.8,
    )  # fmt: skip
    axis.set_xlim(0, pitch * count - 1)
    axis.set_ylim(pitch * len(layers) - 1, 0)
    axis.xaxis.tick_top()
    axis.set_xticks(
        [pitch * t + side / 2 for t in range(count)],
        # A token's own blank begins a word: show it.
        [sequence.pieces[t].replace(" ", "·").replace("\n", "⏎") for t in range(count)],
        color=INK,
    )
    axis.set_yticks(
        [pitch * i + side / 2 for i in range(len(layers))], [f"layer {layer}" for layer in layers]
    )
    for i, label in enumerate(axis.get_yticklabels()):
        label.set(color=COLOURS[i % len(COLOURS)], weight="bold")
    axis.tick_params(length=0, pad=5)
    axis.spines[:].set_visible(False)
    axis.set_title(
        f"Its first {count} tokens: a square is a layer's {experts} experts, 0 at its top left, "
        f"and the chosen ones are dark",
        loc="left", size=12.5, weight="bold", pad=9,
    )  # fmt: skip
    axis.annotate(
        "· is a blank", (1, 1), (0, 24), xycoords="axes fraction", textcoords="offset points",
        ha="right", va="bottom", color=SOFT,
    )  # fmt: skip


def _steps(sequence: Sequence) -> list[int]:
    """Where a prefill step begins, then where generation begins, then the end."""
    prompt = sequence.prompt_tokens
    return [*range(0, prompt, sequence.chunk), prompt, len(sequence.rows)]


def _mix(colour: str, part: float) -> tuple[float, float, float]:
    """`colour` thinned with white; `part` of it stays."""
    red, green, blue = (1 - part * (1 - c) for c in to_rgb(colour))
    return red, green, blue
