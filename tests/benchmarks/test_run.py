# SPDX-License-Identifier: Apache-2.0
"""The benchmark as a program, with stand-ins for engines."""

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.overhead.report import comparisons
from tests.benchmarks.stand_in import make_stand_in

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def build(tmp_path: Path) -> Path:
    return make_stand_in(tmp_path / "stand-in")


def command(out: Path, build: Path, *more: str) -> list[str]:
    words = [sys.executable, "-m", "benchmarks.overhead", "--model", "tiny", "--out", str(out)]
    words += ["--build", f"patched={build}", "--engine", "patched:off", "--engine"]
    return [*words, "patched:opt-in", "--loads", "decode,single", *more]


def run(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=600)


def records_in(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "records.jsonl").read_text().splitlines()]


def complete_rounds(out: Path, load: str) -> list[int]:
    turns = [r for r in records_in(out) if r["kind"] == "turn" and r["load"] == load]
    keys = [(t["start"], t["round"], t["of"]) for t in turns]
    return sorted(key[1] for key in set(keys) if keys.count(key) == key[2] and key[1])


@contextlib.contextmanager
def after_rounds(count: int, out: Path, words: list[str]) -> Iterator[subprocess.Popen[bytes]]:
    """The benchmark after so many rounds."""
    with subprocess.Popen(words, cwd=ROOT, stdout=subprocess.DEVNULL) as running:
        while not (out / "records.jsonl").exists() or len(complete_rounds(out, "decode")) < count:
            assert running.poll() is None, "it ended before these rounds"
            time.sleep(0.05)
        yield running


def test_rounds_and_what_they_cost(tmp_path: Path, build: Path) -> None:
    done = run(*command(tmp_path / "out", build, "--rounds", "8"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert complete_rounds(tmp_path / "out", "decode") == [1, 2, 3, 4, 5, 6, 7, 8]
    found = {
        (c.load, c.label): c
        for c in comparisons(records_in(tmp_path / "out"))
        if c.reference == "patched off"
    }
    everybody = found["decode", "patched opt-in, all"]
    assert everybody.seconds.percent == pytest.approx(50)
    assert everybody.step is not None
    assert everybody.step.percent == pytest.approx(50)
    assert everybody.step_us == pytest.approx((1000, 1500))
    assert found["decode", "patched opt-in, silent"].seconds.percent == pytest.approx(0, abs=1e-6)
    assert "same tokens: decode 8 of 8; single 8 of 8" in done.stdout


def test_a_killed_run_goes_on(tmp_path: Path, build: Path) -> None:
    out = tmp_path / "out"
    words = command(out, build, "--rounds", "1000")
    with after_rounds(3, out, words) as running:
        running.kill()
    before = complete_rounds(out, "decode")
    wanted = str(before[-1] + 2)
    done = run(*command(out, build, "--rounds", wanted, "--together"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert complete_rounds(out, "decode") == list(range(1, before[-1] + 3))
    assert [r["start"] for r in records_in(out) if r["kind"] == "start"] == [1, 2]


@pytest.mark.slow
def test_time_that_is_up_ends_with_a_report(tmp_path: Path, build: Path) -> None:
    # No number of rounds: the time alone ends it.
    done = run(*command(tmp_path / "out", build, "--minutes", "0.32", "--no-kernels"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "## Cost" in (tmp_path / "out/report.md").read_text()
    assert records_in(tmp_path / "out")[-1]["kind"] == "end"


def test_a_signal_ends_with_a_report_and_no_process_left(tmp_path: Path, build: Path) -> None:
    out = tmp_path / "out"
    with after_rounds(1, out, command(out, build)) as running:
        running.terminate()
        assert running.wait(300) == 130
    assert (out / "report.md").exists()
    left = [p for p in Path("/proc").glob("[0-9]*/cmdline") if str(build) in read(p)]
    assert left == []


def read(path: Path) -> str:
    try:
        return path.read_bytes().decode(errors="replace")
    except OSError:
        return ""


def test_an_engine_that_does_not_start_is_named(tmp_path: Path, build: Path) -> None:
    (build / "costs/breaks").touch()
    done = run(*command(tmp_path / "out", build))
    assert done.returncode == 1
    assert "FAILED: engine patched off: RuntimeError: no such engine today" in done.stdout
    assert "Traceback" in done.stdout, "the end of its log"


def test_an_engine_that_dies_leaves_a_report_of_the_rounds_before(
    tmp_path: Path, build: Path
) -> None:
    out = tmp_path / "out"
    words = command(out, build)
    assert run(*words, "--rounds", "1").returncode == 0
    (build / "costs/dies").touch()
    os.unlink(out / "report.md")
    done = run(*words, "--rounds", "9")
    assert done.returncode == 1
    assert "FAILED: engine patched opt-in: ended" in done.stdout
    assert "## Cost" in (out / "report.md").read_text()
