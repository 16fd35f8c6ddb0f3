# SPDX-License-Identifier: Apache-2.0
"""How long rows keep the event loop of the API server busy. Only child processes import vLLM."""

from __future__ import annotations

from typing import Any

from harness.lines import LINES, installed


def run_engine(*arguments: Any) -> None:
    LINES[installed()].enter()
    from benchmarks.front.server import engine

    engine(*arguments)


def run_server(*arguments: Any) -> None:
    LINES[installed()].enter()
    from benchmarks.front.server import server

    server(*arguments)
