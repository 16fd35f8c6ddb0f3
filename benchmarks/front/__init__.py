# SPDX-License-Identifier: Apache-2.0
"""How long rows keep the event loop of the API server busy."""

from __future__ import annotations

import importlib
from typing import Any


def run_process(name: str, *arguments: Any) -> None:
    """Run the process of that name of `server.py`. Only child processes import vLLM."""
    getattr(importlib.import_module("benchmarks.front.server"), name)(*arguments)
