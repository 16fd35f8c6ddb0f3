# SPDX-License-Identifier: Apache-2.0
"""The scheduler with both sides of its connector, in random interleavings, against a naive model:
no row lost, doubled, invented, taken from another request or from other weights; no token computed
from KV that is not there; nothing left of requests that have ended.

`tests/v0_33_0/connector` has the setups, the model, the operations and what must hold.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from vllm.sequence import IntermediateTensors
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import init_none_hash
from vllm.v1.request import RequestStatus

from tests.v0_33_0.connector.engine import Engine
from tests.v0_33_0.connector.operations import Operation, sequences
from tests.v0_33_0.connector.setups import SETUPS, Setup, make_config

EXAMPLES = int(os.environ.get("PROPERTY_EXAMPLES", "100"))


@pytest.fixture(scope="module", autouse=True)
def block_hashes() -> None:
    init_none_hash(sha256)


@contextmanager
def running(setup: Setup) -> Iterator[Engine]:
    engine = Engine(setup)
    try:
        yield engine
    finally:
        engine.runner.connector.close()


@pytest.mark.parametrize("setup", SETUPS.values(), ids=SETUPS)
def test_every_request_gets_exactly_its_rows(setup: Setup) -> None:
    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(sequences(setup))
    def interleave(operations: list[Operation]) -> None:
        with running(setup) as engine:
            for name, arguments, more in operations:
                getattr(engine, name)(*arguments, **more)
            engine.drain()
            engine.check()

    interleave()


def test_request_that_is_preempted_in_its_own_pass_gets_its_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A pass schedules two blocks of a request, and preempts it for one of higher priority."""
    setup = Setup(num_blocks=9, chunk=12)
    config, _ = make_config(setup)
    monkeypatch.setattr(config.scheduler_config, "policy", "priority")
    monkeypatch.setattr(config.scheduler_config, "long_prefill_token_threshold", 8)
    with running(setup) as engine:
        engine.add(list(range(28)), 1)
        engine.requests["0"].priority = 5
        engine.schedule([])
        engine.add([50, 51, 52, 53], 3)
        engine.schedule([])
        assert engine.requests["0"].num_computed_tokens == 20
        engine.schedule([])
        assert engine.requests["0"].status == RequestStatus.PREEMPTED
        engine.drain()
        engine.check()


def test_request_does_not_use_loaded_blocks_that_another_one_computed_meanwhile() -> None:
    """During the load, the KV connector keeps the later KV, of other weights, and then loads it."""
    prompt = list(range(21))
    with running(Setup(connector=True, num_blocks=13)) as engine:
        engine.add(prompt, 1)
        engine.drain()
        engine.evict()
        engine.runner.weights += 1
        while len(engine.requests) < 11:
            engine.add([1], 1)
        engine.add_of_kind(3, prompt)  # its load takes two steps
        engine.add_of_kind(0, prompt)
        engine.drain()
        engine.check()


def relays(engine: Engine) -> bool:
    """Schedule a step; whether its pipeline stages send rows to each other."""
    engine.step([])
    tensors = IntermediateTensors({"hidden_states": torch.zeros(1)})
    sent = engine.runner.connector.relay(tensors, len(engine.runner.rows))
    return len(sent.tensors) > 1


def test_stages_relay_the_rows_of_steps_in_which_a_request_asks() -> None:
    """A session that asks waits for its next part, and a request that asks has just ended."""
    with running(Setup(also=("silent", "session"))) as engine:
        engine.converse([3, 4, 5], 1, 0, [])
        assert relays(engine)
        engine.add([9, 8, 7], 1)
        engine.add([7, 7], 6, return_routed_experts=False)
        assert relays(engine)
        assert [relays(engine) for _ in range(3)] == [False] * 3
        engine.extend(0, [6], 1, 0)
        assert relays(engine)
