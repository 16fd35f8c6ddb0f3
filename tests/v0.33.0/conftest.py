# SPDX-License-Identifier: Apache-2.0
"""The checkpoints and the profiles of the first line's tests.

Tests that both lines run are in `tests/behaviour`. A file here takes all of them with `import *`.
"""

from pathlib import Path

import pytest

import harness.engine_v0_33_0  # noqa: F401  (before vLLM looks for Triton)
import tests.property.conftest  # noqa: F401  (registers hypothesis profiles)
from tests.behaviour.conftest import checkpoint, model  # noqa: F401


@pytest.fixture(scope="session")
def line() -> str:
    return Path(__file__).parent.name
