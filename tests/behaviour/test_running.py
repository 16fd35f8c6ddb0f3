# SPDX-License-Identifier: Apache-2.0
"""Engines of the tests share a process: no state of one may reach the next."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from pathlib import Path

import psutil
import torch

from tests.behaviour.conftest import ask, random_prompt, running


def test_engine_is_gone_with_its_block(checkpoint: Callable[..., Path]) -> None:
    def run() -> list[weakref.ref]:
        with running(checkpoint()) as llm:
            ask(llm, random_prompt(1, 70))
            core = llm.llm_engine.engine_core.engine_core
            runner = core.model_executor.driver_worker.worker.model_runner
            parts = [core, core.scheduler, runner, runner.model, *runner.kv_caches]
            return [weakref.ref(part) for part in parts]

    run()  # starts what exists once per process
    gc.collect()
    threads, children = threading.active_count(), psutil.Process().children()
    left = run()
    gc.collect()
    assert [part() for part in left] == [None] * len(left)
    assert threading.active_count() == threads
    assert not torch.distributed.is_initialized()
    assert psutil.Process().children() == children
