# SPDX-License-Identifier: Apache-2.0
"""The benchmark's plan, its records and its report; no engine."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.common import Failure, Records
from benchmarks.overhead.__main__ import turns_of
from benchmarks.overhead.builds import Build, Variant, read_builds, read_variants
from benchmarks.overhead.loads import TINY_LOADS
from benchmarks.overhead.report import comparisons, pairs_to_compare, report_text

SETUP = {
    "model": "tiny",
    "layers": 4,
    "options": {"seed": 0},
    "loads": {name: {"text": load.text} for name, load in TINY_LOADS.items()},
}
OFF, OPT_IN = Variant(Build("patched"), "off"), Variant(Build("patched"), "opt-in")
# Seconds of a round, by engine and mode.
COSTS = {("off", "off"): 1.0, ("opt-in", "silent"): 1.001, ("opt-in", "all"): 1.02}


def start_record(number: int = 1) -> dict[str, Any]:
    engines = [
        {"name": v.name, "build": "patched", "flag": v.flag, "copy": 1}
        | {"vllm": "1.2.3", "torch": "4.5", "gpu": "A GPU"}
        for v in (OFF, OPT_IN)
    ]
    return {
        "kind": "start",
        "start": number,
        "command": ["overhead.py"],
        "when": "2026-01-01 00:00:00",
        "cores": 2,
        "engines": engines,
    }


def turn_record(flag: str, mode: str, number: int, **what: Any) -> dict[str, Any]:
    # Rounds differ by a little, and all turns of a round alike, as with a clock that drifts.
    seconds = COSTS[flag, mode] * (1 + 0.01 * number + 0.0001 * (number % 3))
    return {
        "kind": "turn",
        "start": 1,
        "load": "decode",
        "round": number,
        "of": 3,
        "engine": f"patched {flag}",
        "mode": mode,
        "seconds": seconds,
        "step_us": 1000 * seconds,
        "tokens": "abc",
        "rows_bytes": 10,
        "cached_tokens": 0,
        **what,
    }


def records_of(rounds: int) -> list[dict[str, Any]]:
    turns = [turn_record(*key, n) for n in range(rounds + 1) for key in COSTS]
    return [{"kind": "setup", **SETUP}, start_record(), *turns]


def test_a_round_has_a_turn_of_every_engine_and_mode() -> None:
    turns = turns_of([OFF, OPT_IN], ["silent", "all"], "decode", 4)
    assert sorted(turns) == [(0, "off"), (1, "all"), (1, "silent")]


def test_rounds_go_there_and_back() -> None:
    orders = [turns_of([OFF, OPT_IN], ["silent", "all"], "decode", n) for n in range(40)]
    assert all(there == back[::-1] for there, back in zip(orders[::2], orders[1::2], strict=True))
    assert len({tuple(order) for order in orders}) == 6


@pytest.mark.parametrize(("flag", "mode"), [("on", "all"), ("off", "silent")])
def test_another_build_is_compared_with_what_does_the_same(flag: str, mode: str) -> None:
    engines = [
        {"name": "ours", "build": "ours", "flag": "opt-in"},
        {"name": "release", "build": "release", "flag": flag},
    ]
    pairs = pairs_to_compare(engines, {"ours": [mode], "release": [flag]})
    assert pairs == [(("release", flag), ("ours", mode))]


def test_weights_are_compared_with_rows_of_each_engine() -> None:
    engines = [
        {"name": "ids", "build": "ours", "flag": "opt-in"},
        {"name": "wide", "build": "ours", "flag": "float32"},
    ]
    pairs = pairs_to_compare(engines, {"ids": ["all"], "wide": ["all", "both"]})
    ids, wide, both = ("ids", "all"), ("wide", "all"), ("wide", "both")
    assert pairs == [(wide, ids), (both, ids), (both, wide)]
    assert pairs_to_compare(engines[1:], {"wide": ["all", "both"]}) == [(both, wide)]


def test_only_engines_with_weights_have_turns_of_both() -> None:
    wide = Variant(Build("patched"), "float16")
    assert wide.options["routed_experts_weights"] == "float16"
    assert "routed_experts_weights" not in OPT_IN.options
    turns = turns_of([OFF, OPT_IN, wide], ["all", "both"], "decode", 4)
    assert sorted(turns) == [(0, "off"), (1, "all"), (2, "all"), (2, "both")]


@pytest.mark.parametrize("word", ["a", "a:of", "c:off", ":off", "a:off"])
def test_unknown_engines_are_refused(word: str) -> None:
    with pytest.raises(ValueError, match="BUILD:FLAG"):
        read_variants(["a:off", word], read_builds(["a="]))


def test_records_go_on_after_a_kill(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    first = Records(path)
    first.begin(SETUP)
    for record in records_of(2)[1:]:
        first.add(record)
    # Killed within round 3, and within a line.
    first.add(turn_record("off", "off", 3))
    with path.open("a") as out:
        out.write(json.dumps(turn_record("opt-in", "silent", 3))[:40])
    again = Records(path)
    again.begin(SETUP)
    assert again.rounds([OPT_IN.name, OFF.name]) == {"decode": 2}
    again.add(start_record(2))
    lines = path.read_text().splitlines()
    assert all(json.loads(line) for line in lines)
    assert len(lines) == 1 + 1 + 9 + 1 + 1


def test_records_of_another_setup_are_refused(tmp_path: Path) -> None:
    records = Records(tmp_path / "records.jsonl")
    records.begin(SETUP)
    with pytest.raises(Failure, match="another setup"):
        records.begin({**SETUP, "layers": 5})


def test_comparison_leaves_out_the_round_that_warms_up() -> None:
    records = records_of(8)
    for record in records:
        if record.get("round") == 0:
            record["seconds"] *= 5 if record["mode"] == "all" else 1
    found = {(c.label, c.reference): c for c in comparisons(records)}
    silent = found["patched opt-in, silent", "patched off"]
    assert silent.seconds.percent == pytest.approx(0.1)
    assert silent.seconds.pairs == 8
    assert silent.verdict == "met"
    everybody = found["patched opt-in, all", "patched off"]
    assert everybody.seconds.percent == pytest.approx(2.0)
    assert everybody.verdict == "missed"
    assert ("patched opt-in, all", "patched opt-in, silent") in found


def test_noise_above_the_target_is_said() -> None:
    records = records_of(8)
    for record in records:
        if record.get("mode") == "silent":
            record["seconds"] *= 1.03 if record["round"] % 2 else 0.97
    silent = next(c for c in comparisons(records) if c.label.endswith("silent"))
    assert "noise" in silent.verdict
    assert "exceeds the target" in report_text(records)


@pytest.mark.parametrize(("rounds", "given"), [(7, False), (8, True)])
def test_summary_has_percentages_and_verdicts_from_eight_rounds_on(
    rounds: int, given: bool
) -> None:
    text = report_text(records_of(rounds))
    costs = text[text.index("## Cost") : text.index("## Rounds")]
    assert ("%" in costs) == given
    assert ("| met |" in costs) == given
    assert ("too few rounds" in costs) != given
