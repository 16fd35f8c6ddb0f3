# SPDX-License-Identifier: Apache-2.0
"""`make soak ON=v0.33.0`: the first line's soak, on this line's engine."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from harness.lines import LINES
from harness.process import ENVIRONMENT
from tests.behaviour import test_soak

if TYPE_CHECKING:
    from vllm.v1.core.sched.scheduler import Scheduler

pytestmark = pytest.mark.slow

LINE = Path(__file__).parent.name
ROOT = Path(__file__).parents[2]


class State(test_soak.State):
    def __init__(self, scheduler: Scheduler) -> None:
        self.connector = scheduler.aux_output_connector

    @property
    def num_blocks(self) -> int:
        return len(self.connector._kv_cached)

    def assert_nothing_is_left(self) -> None:
        connector = self.connector
        kept = (connector._unsent, connector._sent_hash_counts, connector._unsent_hashes)
        assert not any([*kept, connector._emitted, connector._rewound, connector._loading])


def test_soak_of_this_line(checkpoint: Callable[..., Path]) -> None:
    """In a process of its own, because Triton's interpreter must be chosen before vLLM is
    imported."""
    variables = LINES[LINE].variables()
    subprocess.run(
        [sys.executable, __file__, str(checkpoint())],
        cwd=ROOT,
        env={
            # Triton's interpreter takes four requests a second.
            "SOAK_REQUESTS": "2000",
            **os.environ,
            **ENVIRONMENT,
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            **variables,
            # As a program the file is no part of the package `tests`.
            "PYTHONPATH": os.pathsep.join([str(ROOT), variables["PYTHONPATH"]]),
        },
        check=True,
    )


if __name__ == "__main__":
    test_soak.soak(Path(sys.argv[1]), State)
