# SPDX-License-Identifier: Apache-2.0
"""Tables from what `host.py` measured."""

from __future__ import annotations

from typing import Any

from benchmarks.common import table
from benchmarks.host_engine import PARTS, WAYS

# What an engine does: whether it is prepared to return rows, and which requests ask for them.
KINDS = {
    "off": "the flag is off",
    "silent": "the flag is on and nobody asks",
    "one": "one request asks",
    "all": "all requests ask",
}
LABELS = {**{part: (part,) for part in PARTS}, **WAYS, "all": PARTS}
# Load, label, unit, and what it may cost.
BUDGETS: dict[tuple[str, str, str], tuple[str, float]] = {
    ("decode", "all", "scheduler"): ("ms", 0.8),
    ("decode", "all", "to the front end"): ("ms", 0.8),
    ("drafts", "all", "scheduler"): ("ms", 1.5),
    ("few", "silent", "scheduler"): ("µs", 2),
    ("one asks", "one", "scheduler"): ("µs", 30),
    ("one asks", "one", "to the front end"): ("µs", 30),
    ("worker", "one", "take_rows"): ("µs", 30),
    ("group of 64", "all", "longest step"): ("ms", 50),
    ("group of 64", "all", "peak memory"): ("MB", 16),
    ("group of 256", "all", "longest step"): ("ms", 100),
    ("group of 256", "all", "peak memory"): ("MB", 32),
}


def find_figure(records: list[dict[str, Any]], load: str, kind: str, label: str) -> float | None:
    """A figure of the budget, in its unit; None if there were too few rounds."""
    for record in records:
        if record["load"] != load or record.get("kind", kind) != kind:
            continue
        if label == "take_rows":
            return record[kind] - record["silent"]
        if label == "longest step":
            return record["all"]["longest"]
        if label == "peak memory":
            return record["peak"][1] - record["peak"][0]
        if record[label]["average"] is None:
            return None
        unit, _ = BUDGETS[load, kind, label]
        return record[label]["more"] * (1000 if unit == "µs" else 1)
    raise KeyError((load, kind, label))


def budget_text(records: list[dict[str, Any]]) -> str:
    what = {record["load"]: record.get("what", "1,024 requests") for record in records}
    rows = []
    for (load, kind, label), (unit, budget) in BUDGETS.items():
        figure = find_figure(records, load, kind, label)
        shown = "too few rounds" if figure is None else f"**{figure:.3g} {unit}**"
        rows.append([what[load], KINDS[kind], label, shown, f"{budget:g} {unit}"])
    return table(["Load", "Who asks", "What", "More", "To reach"], rows)


def parts_text(record: dict[str, Any]) -> str:
    head = ["Part", "Before", "With", "More", "On average", "99th percentile", "The last step"]
    rows = []
    for label in LABELS:
        if (row := record.get(label)) is None:
            continue
        strong = "" if label in PARTS else "**"
        average = "too few rounds"
        if row["average"] is not None:
            average = "{:+.3f} [{:+.3f}, {:+.3f}]".format(*row["average"])
        rows.append(
            [
                f"{strong}{label}{strong}",
                f"{row['base']:.3f}",
                f"{row['other']:.3f}",
                f"{strong}{row['more']:+.3f}{strong}",
                average,
                *("{:.2f}, {:.2f}".format(*row[key]) for key in ("p99", "last")),
            ]
        )
    base, kind = (KINDS.get(record[key], record[key]) for key in ("base", "kind"))
    heading = f"## {record['what']}: {kind}; before: {base}"
    return f"{heading}\n\n{record['steps']} steps.\n\n" + table(head, rows)


def groups_text(records: list[dict[str, Any]]) -> str:
    head = ["Load", "Part", "That step, silent", "Longest step, more", "Worst group"]
    rows = []
    for record in records:
        for label in LABELS:
            row = record[label]
            longest = "too few rounds" if row["longest"] is None else f"{row['longest']:+.2f}"
            rows.append(
                [record["what"], label, f"{row['silent']:.2f}", longest, f"{row['worst']:+.2f}"]
            )
    peaks = [
        "{}: {:.1f} MB, when all ask {:.1f} MB.".format(record["what"], *record["peak"])
        for record in records
    ]
    return (
        "## Groups with one prompt\n\n" + table(head, rows) + "\nPeak memory of scheduler and "
        "messages on top of the idle scheduler's:\n\n" + "\n".join(f"- {peak}" for peak in peaks)
    )


def profile_text(record: dict[str, Any], most: int = 10) -> str:
    functions = sorted(record["functions"].items(), key=lambda item: -item[1][1])
    rows = [
        [f"`{name}`", f"{calls:.1f}", f"{own:.0f}", f"{total:.0f}"]
        for name, (calls, own, total) in functions[:most]
    ]
    own = sum(values[1] for _, values in functions)
    rows.append(["**all functions**", "", f"**{own:.0f}**", ""])
    head = ["Function", "Calls a step", "µs a step, without what it calls", "with"]
    return f"### {record['what']}: {KINDS[record['kind']]}\n\n" + table(head, rows)
