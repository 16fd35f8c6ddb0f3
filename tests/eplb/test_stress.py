# SPDX-License-Identifier: Apache-2.0
"""A short run of `make stress-eplb`, and that it notices code that is wrong."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.eplb import stress

EPLB = "vllm.distributed.eplb"
MODULES = ("eplb_utils", "async_worker", "eplb_state")

# module, what stands there, what becomes of it
MUTANTS = {
    "a result is visible before its writes are done": (
        "async_worker",
        "                cuda_stream.synchronize()\n",
        "",
    ),
    "the buffer is written again before it is consumed": (
        "async_worker",
        "                consumed_event.wait(stream=cuda_stream)\n",
        "",
    ),
    "the thread waits for the consumer, its stream does not": (
        "eplb_utils",
        "        event.wait(stream)\n",
        "",
    ),
    "the buffer is recorded as consumed too early": (
        "eplb_state",
        "    move_from_buffer(\n",
        "    result.consumed_event.record()\n    result.consumed_event.record = int\n"
        "    move_from_buffer(\n",
    ),
    "a rank does not wait for the others": ("eplb_state", "op=ReduceOp.MIN", "op=None"),
    "errors are swallowed": (
        "async_worker",
        "self._outcome.set_exception(exc)",
        "self._outcome.cancel()",
    ),
    "only the failing rank raises": (
        "eplb_state",
        "            all_reduce(flag, op=ReduceOp.MIN, group=cpu_group)\n",
        "            if status >= 0:\n"
        "                all_reduce(flag, op=ReduceOp.MIN, group=cpu_group)\n",
    ),
    "a rebalance is not finished": (
        "eplb_state",
        "            while eplb_model_state.rebalanced:\n",
        "            if eplb_model_state.rebalanced:\n",
    ),
    "a waiting worker is not woken": (
        "eplb_state",
        "        self.consumed_event.cancel()\n",
        "",
    ),
    "a worker in a transfer is not interrupted": (
        "eplb_state",
        "                model_state.communicator.abort()\n",
        "                pass\n",
    ),
}


@contextmanager
def mutated(name: str, before: str, after: str) -> Iterator[None]:
    """One of vLLM's EPLB modules with other source."""
    modules = {name: importlib.import_module(f"{EPLB}.{name}") for name in MODULES}
    saved = {name: dict(vars(module)) for name, module in modules.items()}
    source = inspect.getsource(modules[name])
    assert before in source
    try:
        namespace = vars(modules[name])
        exec(compile(source.replace(before, after), modules[name].__file__, "exec"), namespace)
        for other in modules.values():
            for key, value in list(vars(other).items()):
                if key in saved[name] and value is saved[name][key]:
                    setattr(other, key, namespace[key])
        yield
    finally:
        for name, names in saved.items():
            vars(modules[name]).update(names)


@pytest.fixture(autouse=True)
def switch_often() -> Iterator[None]:
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(interval)


def run(schedules: int) -> None:
    with stress.fakes():
        for seed in range(schedules):
            stress.run_schedule(seed)


def test_schedules_do_no_harm() -> None:
    run(60)


@pytest.mark.parametrize("name", MUTANTS)
def test_stress_notices(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stress, "WATCHDOG_S", 1)
    monkeypatch.setattr(stress, "MAX_STEPS", 200)
    # Ends at the first schedule that does harm; threads decide which one that is.
    with mutated(*MUTANTS[name]), pytest.raises(AssertionError, match="seed"):
        run(600)
