# SPDX-License-Identifier: Apache-2.0
"""Quantiles, ratios and tables from the records of `latency.py`."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import Records, table
from harness.paired import compare

# Chunks of each stream before the burst: the first are skipped, then these are measured.
SKIPPED, ALONE = 8, 24

# A server's name and a mode.
Label = tuple[str, str]

BURST_HEAD = ["Server, burst", "Rounds", "Answers, MB", "Began within, ms", "Took, ms"]
# Without a burst there is only the first.
PHASES = {
    "alone": "before the burst",
    "admitted": "the first four steps with it",
    "along": "while it decodes",
    "ended": "from its last steps until the last answer is read",
}


def phases_of(
    arrivals: Sequence[float], resumed: float, done: float, output: int
) -> dict[str, list[float]]:
    """Times between the chunks of a stream, by phase.

    Args:
        arrivals: when its chunks came, in seconds; a chunk is a step.
        resumed: when the server was resumed with the burst.
        done: when the last answer of the burst had been read.
        output: tokens, and so steps, of the burst.

    The time to the first chunk after the pause counts from `resumed`.
    """
    times = np.array(arrivals)
    before, after = times[times <= resumed], times[times > resumed]
    gaps = np.diff(np.concatenate([[resumed], after]))
    started = np.concatenate([[resumed], after])[:-1]
    gaps = gaps[started <= done]
    return {
        "alone": np.diff(before)[SKIPPED:].tolist(),
        "admitted": gaps[:4].tolist(),
        "along": gaps[4 : output - 2].tolist(),
        "ended": gaps[max(4, output - 2) :].tolist(),
    }


def quantiles(gaps: Sequence[float]) -> dict[str, float]:
    """Median, 99th percentile and greatest."""
    p50, p99, most = np.quantile(gaps, [0.5, 0.99, 1.0]).tolist()
    return {"p50": p50, "p99": p99, "max": most}


def comparisons_of(labels: Sequence[Label]) -> list[tuple[str, Label, Label]]:
    """The comparisons: a name, a label and its reference."""
    offs = {server.split()[0]: (server, mode) for server, mode in labels if mode == "off"}
    found = [
        (server, (server, "all"), (server, "silent"))
        for server in dict.fromkeys(server for server, _ in labels)
        if {(server, "all"), (server, "silent")} <= set(labels)
    ]
    for server, mode in labels:
        reference = offs.get(server.split()[0])
        if mode == "off":
            # Builds without the flag are compared with the first of them.
            reference = next(iter(offs.values()))
        if reference is not None and reference != (server, mode):
            found.append((f"{server}, {mode} / {reference[0]}", (server, mode), reference))
    return found


def summarize(records: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Quantiles by server and mode and by phase, over all rounds; and ratios within rounds: `all`
    to `silent` of one server, and each label to its reference."""
    turns = [record for record in records if record["kind"] == "turn"]
    versions = [v for r in records if r["kind"] == "start" for v in r["versions"]]

    def place(label: Label) -> int:
        """Sort by the order in which servers were given: rounds alternate theirs."""
        return next((i for i, v in enumerate(versions) if v.startswith(label[0] + " ")), 0)

    labels = sorted(dict.fromkeys((turn["server"], turn["mode"]) for turn in turns), key=place)
    by_label = {
        f"{server}, {mode}": [t for t in turns if (t["server"], t["mode"]) == (server, mode)]
        for server, mode in labels
    }
    found: dict[str, Any] = {"milliseconds": {}, "ratios": {}}
    for label, own in by_label.items():
        found["milliseconds"][label] = {
            phase: quantiles([gap for turn in own for gap in turn["gaps_ms"][phase]])
            for phase in PHASES
            if any(turn["gaps_ms"].get(phase) for turn in own)
        }
    rounds: dict[tuple[int, int], dict[Label, dict[str, list[float]]]] = {}
    for turn in turns:
        of_round = rounds.setdefault((turn["start"], turn["round"]), {})
        of_round[turn["server"], turn["mode"]] = turn["gaps_ms"]
    for name, label, reference in comparisons_of(labels):
        pairs = [(r[label], r[reference]) for r in rounds.values() if {label, reference} <= set(r)]
        for phase in PHASES:
            if not pairs or not all(gaps.get(phase) for pair in pairs for gaps in pair):
                continue
            for quantile in ("p50", "p99"):
                # Chunks that are read together have no time between them; a ratio needs one.
                times = [
                    [max(1e-3, quantiles(pair[i][phase])[quantile]) for pair in pairs]
                    for i in (0, 1)
                ]
                found["ratios"][f"{name}, {phase}, {quantile}"] = str(compare(*times))
    return found


def report_text(records: Sequence[dict[str, Any]]) -> str:
    """The report in Markdown."""
    setup = next(record for record in records if record["kind"] == "setup")
    starts = [record for record in records if record["kind"] == "start"]
    turns = [record for record in records if record["kind"] == "turn"]
    found = summarize(records)
    own = {label: [t for t in turns if label_of(t) == label] for label in found["milliseconds"]}
    millis = [
        [label, phase, *(f"{q[name]:.2f}" for name in ("p50", "p99", "max"))]
        for label, phases in found["milliseconds"].items()
        for phase, q in phases.items()
    ]

    ratios = list(found["ratios"].items())

    def medians(label: str, *keys: str) -> list[str]:
        return [f"{statistics.median(t[key] for t in own[label]):,.2f}" for key in keys]

    if setup["requests"]:
        length = setup["prompt"] + setup["output"]
        title = f"Streams beside {setup['requests']} requests of {length:,} tokens"
        about = (
            f"silent streams; {setup['requests']} requests ({setup['prompt']:,} tokens in, cached; "
            f"{setup['output']} out) are admitted in one step and end in one"
        )
        rows = [[label, PHASES[phase], *numbers] for label, phase, *numbers in millis]
        burst = ("answers_mb", "ended_within_ms", "burst_ms")
        tables = [
            table(["Server, burst", "When", "p50", "p99", "Greatest"], rows),
            "`all`: the burst asks for rows, else it does not. The burst, medians of the rounds: "
            "all answers together, the time between the first and the last answer's beginning, and "
            "from its admission until all was read.\n",
            table(BURST_HEAD, [[label, len(own[label]), *medians(label, *burst)] for label in own]),
        ]
    else:
        title = "Streams that ask"
        ratios = [(name.replace(", alone", ""), cost) for name, cost in ratios]
        about = (
            f"streams of {setup['output']} tokens decode together; `silent`, `tenth`, `all`: how "
            "many of them ask for rows"
        )
        head = ["Server, who asks", "Rounds", "p50", "p99", "Greatest", "Answers, MB"]
        tables = [
            table(
                head,
                [
                    [label, len(own[label]), *numbers, *medians(label, "answers_mb")]
                    for label, _, *numbers in millis
                ],
            )
        ]
    return "\n".join(
        [
            f"# {title}: {setup['model']} on {setup['device']}\n",
            f"{setup['layers']} layers, dummy weights; {setup['streams']} {about}. vLLM "
            f"{', '.join(starts[0]['versions'])}; {starts[0]['cores']} cores, "
            f"{starts[0]['machine']}.\n",
            "```sh\n" + "\n".join("python " + " ".join(s["command"]) for s in starts) + "\n```\n",
            "Milliseconds between two chunks of a stream, over all rounds.\n",
            *tables,
            "By rounds: the Hodges-Lehmann estimate of the ratio and the exact 95 % interval of "
            "Wilcoxon's signed-rank test.\n",
            table(["Of what to what, quantile", "Costs"], ratios),
        ]
    )


def label_of(turn: dict[str, Any]) -> str:
    """Server and mode of a turn."""
    return f"{turn['server']}, {turn['mode']}"


def write_report(records: Records, out: Path) -> None:
    """Write latency.md and latency.json, and print the first."""
    if records.of("turn"):
        text = report_text(records.all)
        (out / "latency.md").write_text(text)
        (out / "latency.json").write_text(json.dumps(summarize(records.all), indent=1) + "\n")
        print(text, flush=True)
