# SPDX-License-Identifier: Apache-2.0
"""Shared by the benchmarks: records on disk, the state of the GPU, messages and tables."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
WORK = ROOT / "build/bench"


class Failure(Exception):
    """The benchmark cannot continue; the text says why."""


def read_gpu() -> dict[str, int]:
    """MHz of the multiprocessors, watts and degrees Celsius of the GPU now; empty without NVML."""
    try:
        import pynvml as nvml

        nvml.nvmlInit()
        gpu = nvml.nvmlDeviceGetHandleByIndex(0)
        return {
            "mhz": nvml.nvmlDeviceGetClockInfo(gpu, nvml.NVML_CLOCK_SM),
            "watts": nvml.nvmlDeviceGetPowerUsage(gpu) // 1000,
            "celsius": nvml.nvmlDeviceGetTemperature(gpu, nvml.NVML_TEMPERATURE_GPU),
        }
    except Exception:
        return {}


class Records:
    """The file of records: one JSON object a line, appended and flushed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.all: list[dict[str, Any]] = []
        if path.exists():
            text = path.read_text()
            # A kill can leave half a line.
            whole = text[: text.rfind("\n") + 1]
            if whole != text:
                path.write_text(whole)
            self.all = [json.loads(line) for line in whole.splitlines()]

    def add(self, record: dict[str, Any]) -> None:
        """Append a record."""
        self.all.append(record)
        with self.path.open("a") as out:
            out.write(json.dumps(record) + "\n")

    def of(self, kind: str) -> list[dict[str, Any]]:
        """Records of a kind."""
        return [record for record in self.all if record["kind"] == kind]

    def begin(self, setup: dict[str, Any]) -> None:
        """Write the setup. Raises Failure if the records are of another one."""
        for there in self.of("setup"):
            if there != {"kind": "setup", **json.loads(json.dumps(setup))}:
                raise Failure(f"{self.path} holds records of another setup: take another --out")
            return
        self.add({"kind": "setup", **setup})

    def rounds(self, engines: Sequence[str]) -> dict[str, int]:
        """Last complete round of each load with just these engines."""
        starts = {
            start["start"]
            for start in self.of("start")
            if sorted(engine["name"] for engine in start["engines"]) == sorted(engines)
        }
        counts: dict[tuple[int, str, int], int] = {}
        last: dict[str, int] = {}
        for turn in self.of("turn"):
            key = (turn["start"], turn["load"], turn["round"])
            counts[key] = counts.get(key, 0) + 1
            if turn["start"] in starts and counts[key] == turn["of"]:
                last[turn["load"]] = max(last.get(turn["load"], 0), turn["round"])
        return last


def command() -> list[str]:
    """This program's arguments of Python, without this machine's folders."""
    file = Path(sys.argv[0])
    name = file.parent.name if file.stem == "__main__" else file.stem
    return ["-m", f"benchmarks.{name}", *map(bare, sys.argv[1:])]


def bare(word: str) -> str:
    """A word of the command without this machine's folders."""
    name, equals, place = word.partition("=")
    return f"{name}={Path(place).name}" if equals and "/" in place else Path(word).name or word


def tell(text: str) -> None:
    """Print a line with the time of day."""
    print(f"[{time.strftime('%H:%M:%S')}] {text}", flush=True)


def read_peak() -> int:
    """The most bytes of memory that this process has had."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.split("VmHWM:")[1].split()[0])


def table(head: str | Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A Markdown table. A head that is a text has " | " between its cells."""
    heads = head.split(" | ") if isinstance(head, str) else head
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines) + "\n"
