# SPDX-License-Identifier: Apache-2.0
"""Weights change: between requests, and under running requests (mode `keep`)."""

from __future__ import annotations

from typing import Any

import pytest

from harness.engine_v0_33_0 import OPTIONS
from tests.behaviour.conftest import environment  # noqa: F401
from tests.behaviour.test_weights import *  # noqa: F403


@pytest.fixture(scope="module")  # type: ignore[no-redef]
def options() -> dict[str, Any]:
    return OPTIONS
