# SPDX-License-Identifier: Apache-2.0
"""Tables from the records of `overhead.py`."""

from __future__ import annotations

import shlex
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.common import table
from benchmarks.overhead.builds import WEIGHTS
from benchmarks.overhead.loads import MODES
from harness.paired import Estimate, compare

Record = dict[str, Any]
# An engine's name and a mode.
Label = tuple[str, str]


@dataclass(frozen=True)
class Comparison:
    """One label against another under one load."""

    load: str
    label: str
    reference: str
    target: float | None  # percent that it may cost
    seconds: Estimate  # difference of a round's time, everything included
    step: Estimate | None  # difference of a decode step's time
    step_us: tuple[float, float] | None  # median microseconds of a step, of reference and label

    @property
    def verdict(self) -> str:
        """Whether the interval is within the target; empty without a target or interval."""
        low, high = self.seconds.low, self.seconds.high
        if self.target is None:
            return ""
        if low is None or high is None:
            return ""
        if high <= self.target:
            return "met"
        if low > self.target:
            return "missed"
        noise = (high - low) / 2
        if noise > self.target:
            return f"not decided: noise of ±{noise:.2f} % exceeds the target"
        return "not decided: the interval holds the target"


def target_of(load: str, mode: str, reference: str) -> float | None:
    """What a mode may cost compared with another one, in percent."""
    if (mode, reference) == ("silent", "off"):
        return 0.2
    if (mode, reference) == ("all", "off"):
        return 0.8 if load == "single" else 0.5
    if (mode, reference) == ("both", "all"):
        return 1.0
    return None


def in_words(label: Label, engine: Record) -> str:
    """Name of an engine and mode in tables."""
    return label[0] if label[1] == engine["flag"] else f"{label[0]}, {label[1]}"


def pairs_to_compare(engines: Sequence[Record], modes: dict[str, list[str]]) -> list[tuple]:
    """(label, reference) of everything that is worth comparing, in the order of the engines.

    A mode is compared with `off` of the same build, or with `off` of the first build if its own has
    none. `all` is also compared with `silent` of its own engine. `on` is also compared with the
    first `all`, and so are `all` and `both` of engines with weights. `both` is also compared with
    `all` of its own engine. The `off` of another build is compared with the first build's `off`, or
    with its `silent`.
    """
    off = {e["build"]: (e["name"], "off") for e in reversed(engines) if e["flag"] == "off"}
    silent = {
        e["build"]: (e["name"], "silent") for e in reversed(engines) if "silent" in modes[e["name"]]
    }
    without_rows = silent | off
    first = next((without_rows[e["build"]] for e in engines if e["build"] in without_rows), None)
    first_all = next(((e["name"], "all") for e in engines if "all" in modes[e["name"]]), None)
    found = []
    for engine in engines:
        for mode in modes[engine["name"]]:
            label = (engine["name"], mode)
            reference = off.get(engine["build"], first if first in off.values() else None)
            if reference and reference != label:
                found.append((label, reference))
            if engine["flag"] == "off" and reference == label and first and first != label:
                found.append((label, first))
            if mode == "on" and first_all:
                found.append((label, first_all))
            if mode == "all" and "silent" in modes[engine["name"]]:
                found.append((label, (engine["name"], "silent")))
            if engine["flag"] in WEIGHTS and mode != "silent":
                own = (engine["name"], "all") if "all" in modes[engine["name"]] else None
                others = {first_all: None, own: None}
                found += [(label, other) for other in others if other and other != label]
    return found


def engines_of(records: Iterable[Record]) -> list[Record]:
    """Every engine that ever started, the first of its name, in order."""
    engines: dict[str, Record] = {}
    for record in records:
        if record["kind"] == "start":
            for engine in record["engines"]:
                engines.setdefault(engine["name"], engine)
    return list(engines.values())


def timed(records: Iterable[Record]) -> dict[str, dict[tuple[int, int], dict[Label, Record]]]:
    """Turns by load, by (start, round), by label; without the rounds that warm up."""
    turns: dict[str, dict[tuple[int, int], dict[Label, Record]]] = defaultdict(
        lambda: defaultdict(dict)
    )
    for record in records:
        if record["kind"] == "turn" and record["round"]:
            by_label = turns[record["load"]][record["start"], record["round"]]
            by_label[record["engine"], record["mode"]] = record
    return turns


def compare_turns(pairs: Sequence[tuple[Record, Record]], key: str = "seconds") -> Estimate:
    return compare(*([turn[key] for turn in turns] for turns in zip(*pairs, strict=True)))


def median_of(turns: Iterable[Record], key: str) -> float:
    return statistics.median(turn[key] for turn in turns)


def comparisons(records: Sequence[Record]) -> list[Comparison]:
    """Everything that can be compared within rounds."""
    engines = engines_of(records)
    by_name = {engine["name"]: engine for engine in engines}
    turns = timed(records)
    seen = {(turn["engine"], turn["mode"]): None for turn in records if turn["kind"] == "turn"}
    modes = {e["name"]: [m for name, m in seen if name == e["name"]] for e in engines}
    order = ["off", "on", *MODES]
    modes = {name: sorted(found, key=order.index) for name, found in modes.items()}
    found = []
    for load, rounds in turns.items():
        for label, reference in pairs_to_compare(engines, modes):
            both = {key: r for key, r in rounds.items() if label in r and reference in r}
            if not both:
                continue
            turns_of_both = [(r[label], r[reference]) for r in both.values()]
            step, step_us = None, None
            if all(turn["step_us"] for pair in turns_of_both for turn in pair):
                step = compare_turns(turns_of_both, "step_us")
                mine, its = zip(*turns_of_both, strict=True)
                step_us = median_of(its, "step_us"), median_of(mine, "step_us")
            found.append(
                Comparison(
                    load,
                    in_words(label, by_name[label[0]]),
                    in_words(reference, by_name[reference[0]]),
                    target_of(load, label[1], reference[1]),
                    compare_turns(turns_of_both),
                    step,
                    step_us,
                )
            )
    return found


def spreads(records: Sequence[Record]) -> list[list[str]]:
    """Rows of the table of rounds: median and spread of every label under every load."""
    by_name = {engine["name"]: engine for engine in engines_of(records)}
    rows = []
    for load, rounds in timed(records).items():
        labels = {label: None for by_label in rounds.values() for label in by_label}
        for label in sorted(labels, key=lambda pair: (list(by_name).index(pair[0]), pair[1])):
            turns = [by_label[label] for by_label in rounds.values() if label in by_label]
            seconds = [turn["seconds"] for turn in turns]
            middle = statistics.median(seconds)
            quarters = statistics.quantiles(seconds, n=4) if len(seconds) > 1 else [middle] * 3
            slow = sum(s > 1.03 * middle for s in seconds)
            steps = [turn["step_us"] for turn in turns if turn["step_us"]]
            rows.append(
                [
                    load,
                    in_words(label, by_name[label[0]]),
                    len(turns),
                    f"{middle:.3f}",
                    f"{100 * (quarters[2] - quarters[0]) / middle:.2f} %",
                    slow,
                    f"{statistics.median(steps):,.1f}" if steps else "",
                    f"{median_of(turns, 'rows_bytes') / 1e6:,.2f}",
                    f"{median_of(turns, 'cached_tokens'):,.0f}",
                ]
            )
    return rows


def costs(found: Sequence[Comparison]) -> str:
    """What each engine and mode costs, as a table."""
    return table(
        "Load | Compared | With | Time | Step | Step, µs | Rounds | May cost | Verdict",
        [
            [
                c.load,
                c.label,
                c.reference,
                str(c.seconds),
                str(c.step or ""),
                f"{c.step_us[0]:,.1f} → {c.step_us[1]:,.1f}" if c.step_us else "",
                c.seconds.pairs,
                "" if c.target is None or c.seconds.percent is None else f"{c.target:.1f} %",
                c.verdict,
            ]
            for c in found
        ],
    )


def checks(records: Sequence[Record]) -> list[str]:
    """What was seen beside the times."""
    turns = [record for record in records if record["kind"] == "turn"]
    equal = []
    for load, rounds in timed(records).items():
        same = [len({turn["tokens"] for turn in r.values()}) == 1 for r in rounds.values()]
        equal.append(f"{load} {sum(same)} of {len(same)}")
    parts = [
        "## Checks\n",
        f"- Rounds in which every engine and mode returned the same tokens: {'; '.join(equal)}.\n"
        "- Every request that asked got a row for every token but the last; no other got any.\n",
    ]
    if clocks := sorted(t["mhz"] for t in turns if "mhz" in t):
        watts = sorted(t["watts"] for t in turns if "watts" in t)
        parts[-1] += (
            f"- The GPU's clock at the end of turns: {clocks[0]:,} to {clocks[-1]:,} MHz, median "
            f"{statistics.median(clocks):,.0f}; power up to {watts[-1]} W.\n"
        )
    return parts


def report_text(records: Sequence[Record]) -> str:
    """The report in Markdown."""
    setup = next(record for record in records if record["kind"] == "setup")
    starts = [record for record in records if record["kind"] == "start"]
    engines = engines_of(records)
    found = comparisons(records)
    device = engines[0]["gpu"] or "CPU"
    turns = [record for record in records if record["kind"] == "turn"]
    versions = ", ".join(f"{b} {v}" for b, v in {e["build"]: e["vllm"] for e in engines}.items())
    parts = [
        f"# What routed experts cost: {setup['model']} on {device}\n",
        f"{setup['layers']} layers, dummy weights; {versions}; torch {engines[0]['torch']}; "
        f"{starts[0]['cores']} cores; started {', '.join(s['when'] for s in starts)} UTC. Engine: "
        + ", ".join(f"`{k}` {v}" for k, v in setup["options"].items())
        + ".\n",
        "```sh\n" + "\n".join("python " + shlex.join(s["command"]) for s in starts) + "\n```\n",
        "All engines of a start live at once and take turns; a round is one turn of each, with the "
        "same prompts, in random order, every other round in the reverse order of the one before. "
        "Ratios are within rounds: the Hodges-Lehmann estimate and, in brackets, the exact 95 % "
        "interval of Wilcoxon's signed-rank test. Time is a round's, everything included; a step's "
        "is the median of its round. "
        "A round's requests are queued before its clock starts. "
        "No round is left out but the first of each start and load, which warms up.\n",
        "Loads: "
        + "; ".join(
            f"{name} {load['text']}"
            for name, load in setup["loads"].items()
            if any(t["load"] == name for t in turns)
        )
        + ".\n",
        "## Cost\n",
        costs(found),
    ]
    if any("not decided" in c.verdict for c in found):
        parts.append(
            "Where noise leaves a verdict open, look at the step's microseconds: they depend less "
            "on what else the machine does.\n"
        )
    parts += [
        "## Rounds\n",
        "Spread is the distance of the quartiles; slow rounds are more than 3 % above the median. "
        "Rows are what requests got in a round.\n",
        table(
            "Load | Engine | Rounds | Median, s | Spread | Slow | Step, µs | Rows, MB | Cached",
            spreads(records),
        ),
    ]
    return "\n".join([*parts, *checks(records)])


def write_report(records: Sequence[Record], out: Path) -> str:
    """Write report.md; returns its text."""
    text = report_text(records)
    (out / "report.md").write_text(text)
    return text
