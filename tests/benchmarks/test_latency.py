# SPDX-License-Identifier: Apache-2.0
"""The latency benchmark's phases and report; no server."""

from typing import Any

import pytest

from benchmarks.latency_report import (
    PHASES,
    comparisons_of,
    phases_of,
    report_text,
    summarize,
)


def test_gaps_belong_to_the_phase_in_which_they_begin() -> None:
    # A chunk a second until 39; paused; on at 50.0 with a burst of ten steps, and half a second
    # more in the first and the last of them.
    before = [float(t) for t in range(40)]
    after = [51.5, *(52.5 + i for i in range(8)), 61.0, 62.0, 63.0, 64.0]
    phases = phases_of(before + after, resumed=50.0, done=62.5, output=10)
    assert phases["alone"] == [1.0] * 31
    assert phases["admitted"] == [1.5, 1.0, 1.0, 1.0]
    assert phases["along"] == [1.0] * 4
    # The last two steps, and what begins until the last answer is read.
    assert phases["ended"] == [1.0, 1.5, 1.0, 1.0]


def records_of(rounds: int) -> list[dict[str, Any]]:
    setup = {"kind": "setup", "model": "tiny", "layers": 4, "device": "CPU"}
    setup |= {"streams": 2, "requests": 4, "prompt": 90, "output": 10}
    start = {"kind": "start", "start": 1, "command": ["latency.py"], "versions": ["a 1"]}
    start |= {"cores": 2, "machine": "x86_64"}
    turns = [
        {
            "kind": "turn",
            "start": 1,
            "round": number,
            "server": "patched opt-in",
            "mode": mode,
            "gaps_ms": {phase: [10.0] * 99 + [worst] for phase in PHASES},
            "answers_mb": 1.5,
            "ended_within_ms": 3.0,
            "burst_ms": 100.0,
        }
        for number in range(1, rounds + 1)
        for mode, worst in (("silent", 20.0), ("all", 30.0))
    ]
    return [setup, start, *turns]


def test_quantiles_are_over_all_rounds() -> None:
    found = summarize(records_of(3))["milliseconds"]["patched opt-in, all"]["ended"]
    assert found["p50"] == 10.0
    assert found["max"] == 30.0
    # 300 gaps, three of them 30 ms: the 296.01st and so on upwards.
    assert found["p99"] == pytest.approx(10.0 + 20.0 * 0.01, abs=0.5)


def test_report_names_load_and_ratio() -> None:
    text = report_text(records_of(8))
    assert "4 requests of 100 tokens" in text
    assert "| patched opt-in, all | from its last steps until the last answer is read |" in text
    assert "| patched opt-in, ended, p50 | +0.00 % [+0.00, +0.00] |" in text


STREAMS = [
    ("pristine off", "off", 10.0),
    ("pristine on", "on", 13.0),
    ("patched off", "off", 10.0),
    ("patched opt-in", "silent", 10.0),
    ("patched opt-in", "tenth", 10.5),
    ("patched opt-in", "all", 11.0),
]


def test_every_label_is_compared_with_its_build_without_the_flag() -> None:
    labels = [(server, mode) for server, mode, _ in STREAMS]
    assert {name: reference for name, _, reference in comparisons_of(labels)} == {
        "patched opt-in": ("patched opt-in", "silent"),
        "pristine on, on / pristine off": ("pristine off", "off"),
        "patched off, off / pristine off": ("pristine off", "off"),
        "patched opt-in, silent / patched off": ("patched off", "off"),
        "patched opt-in, tenth / patched off": ("patched off", "off"),
        "patched opt-in, all / patched off": ("patched off", "off"),
    }


def test_report_of_streams_without_a_burst() -> None:
    setup, start, *_ = records_of(1)
    turns = [
        {
            "kind": "turn",
            "start": 1,
            "round": number,
            "server": server,
            "mode": mode,
            # Rounds that something slowed: ratios are taken within them.
            "gaps_ms": {"alone": [gap * number] * 20},
            "answers_mb": 1.5,
        }
        for number in range(1, 9)
        for server, mode, gap in STREAMS
    ]
    # The first recorded round goes backwards.
    turns[: len(STREAMS)] = turns[: len(STREAMS)][::-1]
    start["versions"] = [f"{server} 1" for server in dict.fromkeys(s for s, _, _ in STREAMS)]
    text = report_text([{**setup, "requests": 0}, start, *turns])
    assert "2 streams of 10 tokens" in text
    assert "| patched opt-in, tenth | 8 | 47.25 | 84.00 | 84.00 | 1.50 |" in text
    assert "| pristine on, on / pristine off, p99 | +30.00 % [+30.00, +30.00] |" in text
    assert "| patched off, off / pristine off, p50 | +0.00 % [+0.00, +0.00] |" in text
    assert "| patched opt-in, all / patched off, p50 | +10.00 % [+10.00, +10.00] |" in text
