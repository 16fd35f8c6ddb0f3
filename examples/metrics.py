# SPDX-License-Identifier: Apache-2.0
"""Draws what Prometheus has read of a server: requests running, tokens generated, rows returned.

python -m examples.metrics --prometheus http://127.0.0.1:9090 --minutes 10 --out metrics.png
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import httpx
import matplotlib

matplotlib.use("Agg")  # no display needed

import matplotlib.pyplot as plt

# Title and query of each picture.
QUERIES = {
    "requests running": "sum(vllm:num_requests_running)",
    "tokens generated": "sum(vllm:generation_tokens_total)",
    "rows returned": "sum(vllm:routed_experts_rows_total)",
}


def draw(url: str, minutes: float, out: Path) -> None:
    """Ask Prometheus for the last minutes, and write the picture as a PNG file.

    Args:
        url: of Prometheus, without a path.

    Raises:
        httpx.HTTPError: no answer, or an error.
        ValueError: Prometheus has read nothing of a server.
    """
    end = time.time()
    span = {"start": end - 60 * minutes, "end": end, "step": max(1.0, minutes / 10)}
    figure, axes = plt.subplots(1, len(QUERIES), figsize=(12, 3.2))
    for axis, (title, query) in zip(axes, QUERIES.items(), strict=True):
        reply = httpx.get(f"{url}/api/v1/query_range", params={"query": query, **span}, timeout=60)
        series = reply.raise_for_status().json()["data"]["result"]
        if not series:
            raise ValueError(f"Prometheus at {url} has nothing of {query} in {minutes:g} minutes")
        times, values = zip(*series[0]["values"], strict=True)
        axis.plot([t - times[0] for t in times], [float(value) for value in values])
        axis.set_title(f"{title}\n{query}", fontsize=9)
        axis.set_xlabel("seconds")
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(out, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m examples.metrics", description=__doc__)
    parser.add_argument("--prometheus", default="http://127.0.0.1:9090", help="URL (%(default)s)")
    parser.add_argument("--minutes", type=float, default=10, help="up to now (%(default)g)")
    parser.add_argument("--out", type=Path, default=Path("metrics.png"), help="%(default)s")
    args = parser.parse_args()
    try:
        draw(args.prometheus.rstrip("/"), args.minutes, args.out)
    except (httpx.HTTPError, ValueError) as e:
        parser.exit(1, f"error: {e}\n")


if __name__ == "__main__":
    main()
