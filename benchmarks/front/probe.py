# SPDX-License-Identifier: Apache-2.0
"""How long callbacks of an event loop take."""

from __future__ import annotations

import asyncio
import contextlib
import time
from multiprocessing.connection import Connection

# Shorter callbacks are not recorded.
LEAST_S = 1e-4


class Probe:
    """Records how long callbacks of the event loop take, and how late a timer is."""

    def __init__(self) -> None:
        # Of each callback: start, end, seconds of processor time.
        self.callbacks: list[tuple[float, float, float]] = []
        # Of each timer: when it was due, and when it came.
        self.ticks: list[tuple[float, float]] = []

    def time_callbacks(self) -> None:
        """Time the callbacks of asyncio's own loop, which does all its work in callbacks."""
        run = asyncio.Handle._run
        clock = time.monotonic
        processor = time.thread_time

        def timed(handle: asyncio.Handle) -> None:
            begin, used = clock(), processor()
            run(handle)
            end = clock()
            if end - begin > LEAST_S:
                self.callbacks.append((begin, end, processor() - used))

        asyncio.Handle._run = timed  # type: ignore[method-assign, assignment]

    async def tick(self) -> None:
        while True:
            due = time.monotonic() + 0.001
            await asyncio.sleep(0.001)
            self.ticks.append((due, time.monotonic()))

    def answer(self, parent: Connection) -> None:
        """For each pair of times from the parent, send back the longest callback between them."""
        with contextlib.suppress(EOFError):
            while True:
                begin, end = parent.recv()
                callbacks = [c for c in list(self.callbacks) if begin <= c[0] and c[1] <= end]
                late = [came - due for due, came in list(self.ticks) if begin <= due <= end]
                self.callbacks.clear()
                self.ticks.clear()
                told = {
                    "callback": max((c[1] - c[0] for c in callbacks), default=0.0),
                    "processor": max((c[2] for c in callbacks), default=0.0),
                    "late": max(late, default=0.0),
                }
                parent.send({name: 1e3 * seconds for name, seconds in told.items()})
