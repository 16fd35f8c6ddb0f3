# SPDX-License-Identifier: Apache-2.0
"""One thread a process: in models this small a second one only waits, and several test processes
share the cores. Libraries read these variables when they are imported."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
# Else it gives OpenMP, and so torch, as many threads as there are cores.
os.environ.setdefault("NUMBA_NUM_THREADS", "1")
