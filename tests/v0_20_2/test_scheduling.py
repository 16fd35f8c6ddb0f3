# SPDX-License-Identifier: Apache-2.0
"""The real scheduler in random interleavings, against the naive model: no row lost, doubled,
invented, taken from another request or from other weights.

`make mutants` breaks the code under test in named ways, each of which must fail here.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, seed, settings
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import init_none_hash

from tests.v0_20_2.engine import Engine
from tests.v0_20_2.operations import operations
from tests.v0_20_2.setups import BLOCK, SETUPS, Setup

EXAMPLES = int(os.environ.get("PROPERTY_EXAMPLES", "150"))
# Seed of the random cases. Without it, every run has the same ones.
SEED = os.environ.get("PROPERTY_SEED")


@pytest.fixture(scope="module", autouse=True)
def block_hashes() -> None:
    init_none_hash(sha256)


@pytest.fixture(scope="module", autouse=True)
def small_arrays() -> Iterator[None]:
    """Two blocks of rows are as many as get an array of their own, and fill it."""
    size = 2 * BLOCK * 8
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("vllm.v1.core.routed_experts_rows.LARGE_ROWS", size)
        patch.setattr("vllm.v1.core.routed_experts_rows.MAX_ROWS_ARRAY", size)
        yield


@pytest.mark.parametrize("examples", [EXAMPLES, pytest.param(1500, marks=pytest.mark.slow)])
@pytest.mark.parametrize("setup", SETUPS.values(), ids=SETUPS.keys())
def test_every_request_gets_exactly_its_rows(setup: Setup, examples: int) -> None:
    @settings(
        max_examples=examples,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(operations(setup))
    def interleave(calls: list[tuple[Any, ...]]) -> None:
        engine = Engine(setup)
        for name, *arguments in calls:
            getattr(engine, name)(*arguments)
        engine.drain()
        engine.check()

    if SEED is not None:
        interleave = seed(int(SEED))(interleave)
    interleave()


def run_step(engine: Engine) -> int:
    """Run a step, and leave its output on its way. Returns how many tokens it computes."""
    engine.start_step()
    return engine.on_the_way[-1].scheduled.total_num_scheduled_tokens


def test_cached_prefix_is_used_with_decode_context_parallel() -> None:
    """All ranks together have one block of the prefix cache."""
    engine = Engine(Setup(context_parallel=2, num_blocks=80, chunk=64))
    prompt = list(range(3 * BLOCK + 1))
    for num_computed in (len(prompt), 1):
        engine.add(prompt, 3)
        assert run_step(engine) == num_computed
        engine.drain()
    engine.check()


def test_prefix_that_a_silent_request_cached_is_computed_again_once() -> None:
    """The silent request still uses its blocks."""
    engine = Engine(Setup(num_blocks=80, chunk=64))
    prompt = list(range(3 * BLOCK + 1))
    engine.add(prompt, 40, asks=False)
    engine.schedule([])
    for num_computed in (len(prompt), 1):
        engine.add(prompt, 3)
        assert run_step(engine) == num_computed + 1
        for _ in range(4):
            engine.schedule([])
    engine.drain()
    engine.check()


@pytest.mark.parametrize("computes_all", [False, True], ids=["block's end", "prompt log-probs"])
def test_rows_of_a_block_that_another_request_computes_again(computes_all: bool) -> None:
    """The first request has computed the block, and returns its rows later."""
    engine = Engine(Setup(num_blocks=80, chunk=16))
    engine.add(list(range(24)), 3)
    assert run_step(engine) == 16
    engine.deliver()
    engine.add(list(range(2 * BLOCK)), 3, computes_all=computes_all)
    # The rest of the first prompt, and the block.
    assert run_step(engine) == 8 + (2 * BLOCK if computes_all else BLOCK)
    assert engine.handed["0"] == []
    engine.drain()
    engine.check()


@pytest.mark.parametrize("leaves", ["aborted", "preempted"])
def test_request_behind_a_failed_load_of_a_request_that_left(leaves: str) -> None:
    """It has blocks that the request computed from what it should have loaded, and not those."""
    engine = Engine(SETUPS["asynchronous, failed loads end"])
    engine.add_relay([10, 11, 12], num_cached=1, start=1, lose=0, leaves=leaves)
    engine.drain()
    engine.check()
