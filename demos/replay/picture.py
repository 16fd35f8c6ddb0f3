# SPDX-License-Identifier: Apache-2.0
"""The picture of the comparison: all tokens without and with replay, and one completion."""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # no display needed

import matplotlib.pyplot as plt
import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap

from demos.replay.mismatch import Mismatch
from demos.replay.report import Result
from demos.rows.picture import FAINT, INK, PAPER, SOFT, STYLE

# Of Okabe and Ito's palette: the trainer's own routes, and the server's.
OWN, REPLAYED = "#D55E00", "#0072B2"


def draw(path: Path, result: Result) -> None:
    """Write the picture as a PNG file; the close-up is of the first completion."""
    plain, replayed = result.plain, result.replayed
    layers = plain.differs[0].shape[1]
    width = 15.0
    left = 0.065
    right = 0.975
    # Heights in inches, from the top.
    title = 1.75
    clouds = 3.7
    gap = 1.35
    stems = 2.0
    strip = 0.2 * layers
    foot = 0.65
    height = title + clouds + gap + stems + strip + foot
    with plt.rc_context(STYLE):
        figure = plt.figure(figsize=(width, height), dpi=120, facecolor=PAPER)

        def axes(top: float, tall: float, begin: float = 0.0, end: float = 1.0) -> Axes:
            """Axes `top` inches from the top, `tall` inches high, over a part of the width."""
            span = right - left
            box = (left + begin * span, 1 - (top + tall) / height, (end - begin) * span)
            return figure.add_axes((*box, tall / height))

        figure.text(
            left, 1 - 0.4 / height, "Replaying the server's routes brings a trainer "
            f"{result.gain.times:.1f} times nearer", size=21, weight="bold", va="center",
        )  # fmt: skip
        figure.text(
            left, 1 - 0.92 / height, f"{plain.deltas.size:,} tokens that vLLM sampled in float32 "
            f"from a small random Qwen3-MoE, and the log-probs that transformers gives "
            f"them in bfloat16.\nMean distance {plain.mean:.4f} without replay, "
            f"{replayed.mean:.4f} with it (times nearer: {result.gain}, 95 % interval). "
            f"In float32 it is {result.control.mean:.0e} without replay.",
            size=11, color=SOFT, va="center", linespacing=1.5,
        )  # fmt: skip
        limit = 1.05 * float(np.abs(plain.deltas).max())
        _cloud(axes(title, clouds, 0, 0.31), result, plain, limit)
        _cloud(axes(title, clouds, 0.335, 0.645), result, replayed, limit)
        _tails(axes(title, clouds, 0.72, 1), plain, replayed)
        _stems(axes(title + clouds + gap, stems), result)
        _strip(axes(title + clouds + gap + stems + 0.08, strip), result)
        figure.savefig(path, facecolor=PAPER)
        plt.close(figure)


def _cloud(axis: Axes, result: Result, way: Mismatch, limit: float) -> None:
    """Every sampled token: the difference over the server's log-prob, in colour where routes
    differ."""
    replayed = way is result.replayed
    colour = REPLAYED if replayed else OWN
    x = np.concatenate([c.logprobs for c in result.completions])
    parts = [_routed_otherwise(result, i).any(axis=1) for i in range(len(result.completions))]
    marked = np.concatenate(parts)
    for part, tone, size in ((~marked, "#aab4be", 5), (marked, colour, 9)):
        axis.scatter(x[part], way.deltas[part], s=size, color=tone, alpha=0.55, linewidth=0)
    axis.axhline(0, color=INK, linewidth=0.8, zorder=0)
    axis.set_ylim(-limit, limit)
    axis.set_xlabel("the server's log-prob of a sampled token")
    if replayed:
        axis.tick_params(labelleft=False)
    else:
        axis.set_ylabel("trainer's log-prob less the server's")
    heading = "A trainer with the server's routes" if replayed else "A trainer with its own routes"
    _heading(axis, heading, colour)
    axis.text(
        0.02, 0.02, f"in colour: {100 * marked.mean():.0f} % of the tokens, which the trainer\n"
        f"by itself would route otherwise", transform=axis.transAxes, color=SOFT, size=9,
        va="bottom",
    )  # fmt: skip


def _tails(axis: Axes, plain: Mismatch, replayed: Mismatch) -> None:
    """The share of tokens whose distance is greater than each value."""
    for way, colour in ((plain, OWN), (replayed, REPLAYED)):
        sizes = np.sort(np.abs(way.deltas))
        share = 100 * (1 - np.arange(len(sizes)) / len(sizes))
        axis.plot(sizes, share, color=colour, linewidth=2.2)
    axis.set_xscale("log")
    axis.set_yscale("log")
    axis.set_xlim(1e-3, 1.3 * float(np.abs(plain.deltas).max()))
    axis.set_ylim(bottom=0.8 * 100 / len(plain.deltas))
    axis.xaxis.set_major_formatter("{x:g}")
    axis.yaxis.set_major_formatter("{x:g} %")
    axis.grid(color=FAINT)
    axis.set_xlabel("distance: |trainer's log-prob less the server's|")
    _heading(axis, "Share of tokens farther away")


def _stems(axis: Axes, result: Result) -> None:
    """The difference at each sampled token of the first completion, both ways."""
    tokens = np.arange(len(result.completions[0].token_ids))
    for way, colour, shift in ((result.plain, OWN, -0.17), (result.replayed, REPLAYED, 0.17)):
        axis.bar(tokens + shift, way.delta[0], width=0.34, color=colour)
    axis.axhline(0, color=INK, linewidth=0.8)
    axis.set_xlim(-0.7, len(tokens) - 0.3)
    axis.set_ylabel("trainer's log-prob\nless the server's")
    axis.tick_params(labelbottom=False, length=0)
    _heading(axis, "One completion, token by token")
    axis.set_title(
        "with the server's routes", loc="right", size=10.5, color=REPLAYED, weight="bold", pad=9
    )
    axis.annotate(
        "with its own routes", (1, 1), (-172, 9), xycoords="axes fraction",
        textcoords="offset points", ha="right", color=OWN, weight="bold", size=10.5,
    )  # fmt: skip


def _strip(axis: Axes, result: Result) -> None:
    """Below the stems: in which layers the pass that gave a token's log-prob differs."""
    differs = _routed_otherwise(result, 0)
    count, layers = differs.shape
    axis.pcolormesh(
        np.arange(count + 1) - 0.5, np.arange(layers + 1) - 0.5, differs.T,
        cmap=ListedColormap(["#f3f5f7", OWN]), vmin=0, vmax=1, edgecolors=PAPER, linewidth=0.6,
    )  # fmt: skip
    axis.set_xlim(-0.7, count - 0.3)
    axis.set_ylim(layers - 0.5, -0.5)
    axis.set_yticks(
        [0, layers - 1], [f"layer {m}" for m in np.take(result.completions[0].moe_layers, [0, -1])]
    )
    axis.spines[:].set_visible(False)
    axis.tick_params(length=0)
    axis.set_xlabel(
        "sampled token; a square is a layer in which the trainer by itself takes other experts in "
        "the pass that gives its log-prob"
    )


def _routed_otherwise(result: Result, index: int) -> npt.NDArray[np.bool_]:
    """(O, M) for one completion: where the trainer's own choice differs. The log-prob of a
    sampled token comes from the pass of the token before, so its routes are compared."""
    completion = result.completions[index]
    return result.plain.differs[index][len(completion.prompt) - 1 - completion.start :]


def _heading(axis: Axes, heading: str, colour: str = INK) -> None:
    axis.set_title(heading, loc="left", size=12.5, weight="bold", pad=9, color=colour)
    axis.spines[["top", "right"]].set_visible(False)
