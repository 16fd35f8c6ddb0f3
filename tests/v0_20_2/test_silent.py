# SPDX-License-Identifier: Apache-2.0
"""A step whose requests are all silent: nothing is copied, kept or sent for routed experts."""

from __future__ import annotations

import tracemalloc

import pytest
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import init_none_hash
from vllm.v1.core.routed_experts_rows import NEVER
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.serial_utils import MsgpackEncoder

from tests.v0_20_2.engine import Engine
from tests.v0_20_2.setups import BLOCK, Setup

PROMPT = list(range(3 * BLOCK))
OURS = [tracemalloc.Filter(True, f"*{name}*") for name in ("routed_experts", "numpy")]


@pytest.fixture(params=[True, False], ids=["synchronous", "asynchronous"])
def engine(request: pytest.FixtureRequest) -> Engine:
    init_none_hash(sha256)
    setup = Setup(num_blocks=200) if request.param else Setup(True, depth=2, num_blocks=200)
    return Engine(setup)


def step(engine: Engine) -> list[bytes]:
    """Run one step; its message to the client, less the time it was made at."""
    engine.start_step()
    ran = engine.on_the_way.pop()
    assert ran.output.routed_experts is None
    outputs = engine.scheduler.update_from_output(ran.scheduled, ran.output)
    outputs = outputs.get(0, EngineCoreOutputs())
    outputs.timestamp = 1.0
    return [bytes(frame) for frame in MsgpackEncoder().encode(outputs)]


def test_message_is_that_of_an_engine_without_the_flag(engine: Engine) -> None:
    without = Engine(engine.setup)
    without.scheduler.routed_experts = None
    for one in (engine, without):
        for length in (5, 9, 12):
            one.add(PROMPT[:length], 12, asks=False)
    for _ in range(10):
        assert step(engine) == step(without)


def test_nothing_is_kept_or_allocated(engine: Engine) -> None:
    for _ in range(3):
        engine.add(PROMPT, 30, asks=False)
    for _ in range(6):
        step(engine)
    tracemalloc.start()
    try:
        before = tracemalloc.take_snapshot().filter_traces(OURS)
        tracemalloc.reset_peak()
        for _ in range(10):
            step(engine)
        after = tracemalloc.take_snapshot().filter_traces(OURS)
    finally:
        tracemalloc.stop()
    grown = [s for s in after.compare_to(before, "lineno") if s.size_diff > 128]
    assert grown == []
    manager = engine.scheduler.routed_experts
    assert not manager.requests
    assert not manager.steps_in_flight
    assert (manager.rows.cached_step == NEVER).all()
    assert manager.take_stats() is None
