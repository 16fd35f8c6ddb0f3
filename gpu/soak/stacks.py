# SPDX-License-Identifier: Apache-2.0
"""The stacks of an engine's processes in steps that are late, and full garbage collections, which
stop a process. All of them append to one file."""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import gc
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from benchmarks.common import family

LATE_S = 0.25
# A CPU that rehearses is late in every step.
MOST = 20
# Triton's LLVM takes over SIGUSR1 and most others in a worker that compiles.
SIGNAL = signal.SIGRTMIN


def _note_collection(file: Any, began: dict[str, float], phase: str, info: dict[str, int]) -> None:
    if info["generation"] < 2:
        return
    if phase == "start":
        began["s"] = time.monotonic()
    elif (took := time.monotonic() - began["s"]) > LATE_S / 10:
        file.write(f"{time.time():.3f} process {os.getpid()} collected garbage for {took:.3f} s\n")


def register(path: Path) -> None:
    """Append this process's stacks at each signal, and its full garbage collections."""
    file = path.open("a", buffering=1)
    faulthandler.register(SIGNAL, file)
    gc.callbacks.append(functools.partial(_note_collection, file, {}))


def watch(get_start: Callable[[], float | None], stop: threading.Event, path: Path) -> None:
    """Send the signal to this process and its children in each step that is late.

    Args:
        get_start: Returns when the step began, by `time.monotonic()`, None if there is none.
        stop: Ends the function.
        path: The file of `register()`.
    """
    dumped: set[float] = set()
    with path.open("a", buffering=1) as file:
        while not stop.wait(0.02) and len(dumped) < MOST:
            start = get_start()
            if start is None or start in dumped or time.monotonic() - start < LATE_S:
                continue
            dumped.add(start)
            for process in family():
                with contextlib.suppress(psutil.Error):
                    name = " ".join(process.cmdline()).strip()[-80:]
                    if not _catches_signal(process.pid):
                        continue
                    took = time.monotonic() - start
                    file.write(
                        f"\n{time.time():.3f} step took {took:.3f} s: {process.pid} {name}\n"
                    )
                    process.send_signal(SIGNAL)
                    time.sleep(0.02)  # It writes now.


def _catches_signal(pid: int) -> bool:
    """A process that does not, such as a compiler, would end."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
    mask = next(line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:"))
    return bool(int(mask, 16) >> (SIGNAL - 1) & 1)
