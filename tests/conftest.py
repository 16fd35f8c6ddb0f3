# SPDX-License-Identifier: Apache-2.0
"""One thread per process: small models do not use a second one, and several test processes share
the cores. Libraries read these variables at import."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
# Else numba gives OpenMP, and so torch, one thread per core.
os.environ.setdefault("NUMBA_NUM_THREADS", "1")
