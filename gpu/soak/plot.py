# SPDX-License-Identifier: Apache-2.0
"""A picture of soak records."""

from __future__ import annotations

import json
import statistics
from pathlib import Path


def plot(files: list[Path], out: Path) -> int:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    records = [json.loads(file.read_text()) for file in files]
    models = sorted({r["model"] for r in records})
    figure, axes = plt.subplots(
        3, len(models), figsize=(6.5 * len(models), 8), squeeze=False, sharex="col"
    )
    labels = sorted({f"{r['build']}, flag {r['flag']}" for r in records})
    for column, model in enumerate(models):
        top, middle, bottom = axes[:, column]
        top.set_title(model, fontsize=10)
        for record in (r for r in records if r["model"] == model):
            label = f"{record['build']}, flag {record['flag']}"
            color = f"C{labels.index(label)}"
            ranks = [
                [s for s in rank["seconds"] if s["phase"] == "load"] for rank in record["ranks"]
            ]
            count = min(map(len, ranks), default=0)
            if not count:
                continue
            t = [s["t"] for s in ranks[0][:count]]
            finished = [sum(rank[i]["finished"] for rank in ranks) for i in range(count)]
            # Requests take seconds: a mean over ten seconds is easier to read than single counts.
            mean = [statistics.fmean(finished[max(0, i - 4) : i + 6]) for i in range(len(finished))]
            gaps = [1e3 * max(rank[i]["longest_gap_s"] for rank in ranks) for i in range(count)]
            memory = [sum(rank[i]["rss_mb"] for rank in ranks) / 1024 for i in range(count)]
            top.plot(t, mean, color=color, label=label)
            middle.plot(t, gaps, color=color, linewidth=0.8)
            bottom.plot(t, memory, color=color)
        top.set_ylabel("requests/s, mean of 10 s")
        top.set_ylim(bottom=0)
        top.legend(fontsize=8)
        middle.set_ylabel("longest gap between steps, ms")
        middle.set_yscale("log")
        bottom.set_ylabel("host memory, GiB")
        bottom.set_ylim(bottom=0)
        bottom.set_xlabel("s")
        for axis in (top, middle, bottom):
            axis.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(out, dpi=110)
    return 0
