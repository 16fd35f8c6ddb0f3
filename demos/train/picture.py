# SPDX-License-Identifier: Apache-2.0
"""The picture of the training loop: each figure over the steps, both ways."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # no display needed

import matplotlib.pyplot as plt

from demos.rows.picture import FAINT, INK, PAPER, SOFT, STYLE
from demos.train import ARMS
from demos.train.report import Step, means

# Of Okabe and Ito's palette.
COLOURS = {"own": "#D55E00", "replay": "#0072B2"}
PANELS: dict[str, Callable[[Step], float]] = {
    "Mean difference\nof log-probs, nats": lambda s: s.mean,
    "Greatest difference\nof log-probs, nats": lambda s: s.greatest,
    "KL divergence (k3),\n0.001 nats": lambda s: 1000 * s.k3,
    "Tokens with a ratio\noutside 0.5 to 2, %": lambda s: 100 * s.outside,
    "Decisions in which its own\nrouter differs from the row, %": lambda s: 100 * s.differs,
}


def draw(path: Path, steps: Sequence[Step]) -> None:
    """Write the picture of the steps of both ways as a PNG file."""
    mean = means(steps)
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(1, len(PANELS), figsize=(19, 5.2), dpi=110, facecolor=PAPER)
        figure.subplots_adjust(left=0.035, right=0.985, top=0.68, bottom=0.12, wspace=0.24)
        figure.text(
            0.035, 0.93, f"Over {len(steps) // len(ARMS)} optimizer steps, replay brings the mean "
            f"difference from {mean['own']:.4f} to {mean['replay']:.4f}",
            size=20, weight="bold", va="center",
        )  # fmt: skip
        figure.text(
            0.035, 0.85, "TRL's GRPOTrainer in bfloat16 on rollouts of vLLM in float32, a small "
            "random Qwen3-MoE; new weights are sent before each rollout. The weights are "
            "random: nothing here is about learning.", size=11, color=SOFT, va="center",
        )  # fmt: skip
        for axis, (title, value) in zip(axes, PANELS.items(), strict=True):
            for arm, name in ARMS.items():
                mine = [s for s in steps if s.arm == arm]
                x, y = [s.step + 1 for s in mine], [value(s) for s in mine]
                axis.plot(x, y, "o-", color=COLOURS[arm], linewidth=2.2, label=name)
            axis.set_title(title, loc="left", size=12, weight="bold", pad=9, color=INK)
            axis.set_xlabel("optimizer step")
            axis.set_xticks(sorted({s.step + 1 for s in steps}))
            axis.set_ylim(bottom=0)
            if not any(value(s) for s in steps):
                axis.set_ylim(0, 1)
            axis.grid(axis="y", color=FAINT)
            axis.spines[["top", "right"]].set_visible(False)
        axes[0].legend(frameon=False, labelcolor="linecolor")
        figure.savefig(path, facecolor=PAPER)
        plt.close(figure)
