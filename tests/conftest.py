# SPDX-License-Identifier: Apache-2.0
"""The line that is tested, and one thread per process: small models do not use a second one, and
several test processes share the cores. Libraries read these variables at import."""

from __future__ import annotations

import os

import pytest
from hypothesis import Phase, settings

from harness.lines import LINES, installed

os.environ.setdefault("OMP_NUM_THREADS", "1")
# Else numba gives OpenMP, and so torch, one thread per core.
os.environ.setdefault("NUMBA_NUM_THREADS", "1")

# A mutant must fail; which example is the smallest does not matter.
settings.register_profile("unshrunk", phases=[Phase.explicit, Phase.generate])

# Folders of tests that one line alone has: the other lines' are left out.
_FOLDERS = {name: name.replace(".", "_") for name in LINES}
collect_ignore = [folder for name, folder in _FOLDERS.items() if name != installed()]


def pytest_configure(config: pytest.Config) -> None:
    """Before any test imports vLLM."""
    LINES[installed()].enter()


@pytest.fixture(scope="session")
def line() -> str:
    """The line of `patches/` whose vLLM is installed."""
    return installed()
