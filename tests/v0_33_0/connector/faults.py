# SPDX-License-Identifier: Apache-2.0
"""Faults for v0.33.0's property test, and the recovery of an engine from faults of its steps."""

from __future__ import annotations

import queue
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from vllm.v1.fault_tolerance.engine_core_sentinel import EngineCoreSentinel
from vllm.v1.fault_tolerance.utils import FaultToleranceRequest
from vllm.v1.worker.sentinel.gpu_worker_sentinel import WorkerSentinel

# Methods of the worker's connector, and of its parts.
WORKER = (
    "_new_state",
    "_publish_blocks",
    "_commit_output",
    "_add_earlier",
    "_teardown",
    "_rewind",
)
BUFFER = ("capture", "stage")
STORE = ("put", "get_concatenated")
SCHEDULER = ("_take_new_hashes",)
PLACES = [*WORKER, *BUFFER, *STORE, *SCHEDULER, "snapshot_routing_data", "copy", "pack"]


class Fault(Exception):
    """What a broken place raises."""


class Faults:
    """Breaks the next calls of some methods of an engine."""

    def __init__(self, worker: Any, scheduler_side: Any, note: Callable[[], None]) -> None:
        """Args:
        worker: the connector of the worker.
        scheduler_side: the connector of the scheduler.
        note: is called before a call fails.
        """
        self.armed: Counter[str] = Counter()
        self.note = note
        for owner, names in (
            (worker, WORKER),
            (worker._buffer, BUFFER),
            (worker._store._store, STORE),
            (scheduler_side, SCHEDULER),
            (worker._capturer, ("snapshot_routing_data",)),
        ):
            for name in names:
                setattr(owner, name, self.breakable(name, getattr(owner, name)))
        snapshot = worker._capturer.snapshot_routing_data
        worker._capturer.snapshot_routing_data = lambda *args: self.wrap(snapshot(*args))

    def breakable(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if self.armed[name]:
                self.armed[name] -= 1
                self.note()
                raise Fault(name)
            return function(*args, **kwargs)

        return call

    def wrap(self, rows: torch.Tensor) -> Any:
        """A tensor whose copy to the host can fail."""
        return SimpleNamespace(to=self.breakable("copy", rows.to))

    def break_pack(self, rows: Any) -> None:
        if rows is not None:
            rows.pack = self.breakable("pack", rows.pack)


def recover(scheduler: Any, worker: Any, steps: deque[Any], depth: int, config: Any) -> None:
    """What the engine does after a step has failed in the worker, with `--enable-fault-tolerance`:
    end all requests, and go on. `steps` are those before the failed one, which are still on their
    way."""
    runner = SimpleNamespace(
        execute_model_state=None,
        req_states=SimpleNamespace(req_id_to_index={}),
        aux_output_connector=worker,
    )
    worker_sentinel = object.__new__(WorkerSentinel)
    worker_sentinel.dp_size = 1
    worker_sentinel.worker = SimpleNamespace(
        model_runner=runner, use_v2_model_runner=True, vllm_config=config
    )

    def collective_rpc(method: str, args: tuple[Any, ...]) -> None:
        assert method == "handle_ft_command"
        worker_sentinel.handle_command(*args)

    batch_queue: deque[Any] = deque(maxlen=depth)
    for step in steps:
        step.consume()
        future: Future[Any] = Future()
        future.set_result(step.output)
        batch_queue.appendleft((future, step.scheduled, None))
    engine = SimpleNamespace(
        scheduler=scheduler,
        model_executor=SimpleNamespace(collective_rpc=collective_rpc),
        batch_queue=batch_queue if depth > 1 else None,
        output_queue=queue.Queue(),
        engine_index=0,
        _send_abort_outputs=lambda aborted: None,
    )
    tolerance = SimpleNamespace(engine_recovery_timeout_sec=1)
    sentinel = EngineCoreSentinel(engine, SimpleNamespace(fault_tolerance_config=tolerance))
    sentinel.on_fault(Fault("step"))
    with mock.patch.object(torch.accelerator, "synchronize"):
        result = sentinel.retry(FaultToleranceRequest("retry", {}))
    assert result.success
    steps.clear()
