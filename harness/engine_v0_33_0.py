# SPDX-License-Identifier: Apache-2.0
"""Engines of the line v0.33.0 in the process of the tests, with Triton's interpreter.

Import this module before vLLM: it sets the environment.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from harness.lines import LINES

LINE = LINES["v0.33.0"]
os.environ.update(LINE.environment)
sys.path[:0] = map(str, LINE.packages)

# Options of engines, on top of those of `tests/behaviour/conftest.py`.
OPTIONS: dict[str, Any] = {"kernel_config": {"enable_jit_warmup": False}}
