# SPDX-License-Identifier: Apache-2.0
"""The scheduler and a worker's forced experts in random interleavings, against a naive model.

Requests share their tokens and differ in their routes. A worker forces each token that it computes
with its request's row, if it has one. A request reads only KV of its own tokens and routes.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from vllm.model_executor.layers.fused_moe.router.forced_experts import weigh_experts
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import init_none_hash
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.forced_routed_experts import DTYPE, ForcedRoutedExperts
from vllm.v1.request import Request
from vllm.v1.worker.gpu import forced_routed_experts as worker_side

from tests.v0_33_0.connector.engine import Engine
from tests.v0_33_0.connector.operations import LENGTHS, PROMPTS, TAILS, operation, sequences
from tests.v0_33_0.connector.runner import BlockIds, Runner
from tests.v0_33_0.connector.setups import BLOCK, MAX_LEN, Setup

EXAMPLES = int(os.environ.get("PROPERTY_EXAMPLES", "100"))
LAYERS = 3
EXPERTS = 8
TOP_K = 2
SETUPS = {
    "synchronous": Setup(also=("preempt", "silent")),
    "resets": Setup(also=("preempt", "reset")),
    "sessions": Setup(asynchronous=True, depth=2, also=("preempt", "session", "reset")),
    "drafts": Setup(asynchronous=True, depth=2, drafts=2, also=("preempt", "silent")),
    "batch queue": Setup(depth=3),
    "hashes with lookahead": Setup(drafts=3, lookahead=1, also=("preempt",)),
    "without prefix caching": Setup(caching=False, also=("preempt", "session")),
}

Rows = npt.NDArray[np.int16]


def make_routes(seed: int) -> Rows:
    """A row for each position. Routes of two seeds differ from a position on."""
    scores = np.random.default_rng(0).random((MAX_LEN, LAYERS, EXPERTS))
    if seed:
        scores[seed * 5 :] = np.random.default_rng(seed).random(
            (MAX_LEN - seed * 5, LAYERS, EXPERTS)
        )
    rows = scores.argsort(-1)[..., :TOP_K].astype(DTYPE)
    rows[::4, seed % LAYERS] = -1
    if seed == 2:
        rows[::2] = -1
    if seed == 3:
        # One row at every position: only its place tells blocks apart.
        rows[:] = rows[1]
    return rows


ROUTES = [make_routes(seed) for seed in range(4)]
# Seed, first position and length of a forced range.
RANGES = st.tuples(
    st.integers(0, len(ROUTES) - 1),
    st.sampled_from([0, 0, 1, 3, 4, 9]),
    st.sampled_from([1, 2, 6, 30]),
)


class ForcedRunner(Runner):
    """Its model's KV and rows depend on the experts of all tokens up to theirs."""

    def __init__(self, setup: Setup, config: Any, kv_cache: Any) -> None:
        super().__init__(setup, config, kv_cache)
        with mock.patch.multiple(
            worker_side,
            _get_routed_experts_shape=lambda _: (LAYERS, EXPERTS, TOP_K),
            bind_routed_experts_forcer=lambda *_: None,
        ):
            self.state = worker_side.ForcedRoutedExpertsState(
                torch.nn.Module(), config, torch.device("cpu")
            )
        # By request: a row for each position, -1 where the router chooses.
        self.given: dict[str, Rows] = {}
        self.starts: dict[str, int] = {}

    def _update(self, scheduled: SchedulerOutput) -> Any:
        for req_id in {*scheduled.finished_req_ids, *(scheduled.preempted_req_ids or ())}:
            self.state.remove_request(req_id)
        for new in scheduled.scheduled_new_reqs:
            self.state.remove_request(new.req_id)
            self.state.add_request(new)
        self.starts, admitted = super()._update(scheduled)
        return self.starts, admitted

    def _compute(
        self, fed: dict[str, list[int]], ranges: dict[str, range], ids: BlockIds, admitted: set[str]
    ) -> Any:
        self.check_forced(ranges)
        routed = {
            req_id: [
                token + 1000 * (zlib.crc32(row.tobytes()) % 1_000_000)
                for token, row in zip(tokens, self.given[req_id], strict=False)
            ]
            + tokens[MAX_LEN:]
            for req_id, tokens in fed.items()
        }
        return super()._compute(routed, ranges, ids, admitted)

    def check_forced(self, ranges: dict[str, range]) -> None:
        req_ids, counts = list(ranges), [len(positions) for positions in ranges.values()]
        batch: Any = SimpleNamespace(
            req_ids=req_ids,
            idx_mapping_np=np.arange(len(req_ids)),
            num_scheduled_tokens=np.array(counts),
            num_tokens=sum(counts),
        )
        starts = np.array([self.starts[req_id] for req_id in req_ids])
        forces = self.state.begin_step(batch if req_ids else None, starts)
        expected = np.full((sum(counts), LAYERS, TOP_K), -1, DTYPE)
        first = 0
        for req_id, positions in ranges.items():
            rows = self.given[req_id][positions.start : positions.stop]
            expected[first : first + len(rows)] = rows
            first += len(positions)
        forcer = self.state._forcer
        found = forcer._buffer[:, : len(expected)].transpose(0, 1).numpy()
        assert forcer._num_tokens == (len(expected) if forces else 0)
        assert forces or (expected == -1).all(), "a step with forced tokens is not forced"
        np.testing.assert_array_equal(found if forces else expected, expected)


class ForcedEngine(Engine):
    """An engine some of whose requests bring rows."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self.runner.connector.close()
        kv_cache = self.scheduler.kv_cache_config
        self.runner: ForcedRunner = ForcedRunner(setup, self.config, kv_cache)

    def make_request(
        self,
        req_id: str,
        prompt: list[int],
        max_tokens: int,
        forced: tuple[int, int, int] | None = None,
        **more: Any,
    ) -> Request:
        request = super().make_request(req_id, prompt, max_tokens, **more)
        rows = np.full((MAX_LEN, LAYERS, TOP_K), -1, DTYPE)
        if forced is not None and (first := forced[1]) < len(prompt):
            end = min(first + forced[2], len(prompt))
            rows[first:end] = ROUTES[forced[0]][first:end]
            request.forced_routed_experts = ForcedRoutedExperts(first, rows[first:end].copy())
            request.block_hashes.clear()
            request.update_block_hashes()
        # Later parts of a session bring none.
        self.runner.given.setdefault(req_id, rows)
        return request

    def resume(self, index: int, tail: list[int], max_tokens: int, seed: int) -> None:
        """Go on with what a request has so far, under the routes of a seed."""
        if self.requests:
            prompt = [*self.requests[str(index % len(self.requests))].all_token_ids, *tail]
            if len(prompt) + max_tokens < MAX_LEN:
                self.add(prompt, max_tokens, forced=(seed, 0, len(prompt) - len(tail)))

    def move(self, prompt: list[int], first: int, length: int) -> None:
        """Ask for a prompt with the same rows at two places."""
        for start in (first, first + 1):
            self.add([*prompt, *range(BLOCK)], 1, forced=(3, start, length))
            self.drain()

    def check_nothing_is_left(self) -> None:
        super().check_nothing_is_left()
        assert not self.runner.state._requests


FORCED = [
    *[operation("add", PROMPTS, LENGTHS, forced=RANGES)] * 4,
    *[operation("resume", st.integers(0, 20), TAILS, st.integers(1, 6), st.integers(0, 3))] * 2,
    operation("move", PROMPTS, st.integers(0, 3), st.integers(1, 2)),
    operation("add", PROMPTS, LENGTHS, forced=RANGES, return_routed_experts=st.just(False)),
]
SESSION = operation("add", PROMPTS, st.integers(1, 6), forced=RANGES, session=st.just(True))


@pytest.fixture(scope="module", autouse=True)
def block_hashes() -> None:
    init_none_hash(sha256)


@contextmanager
def running(setup: Setup) -> Iterator[ForcedEngine]:
    engine = ForcedEngine(setup)
    try:
        yield engine
    finally:
        engine.runner.connector.close()


@pytest.mark.parametrize("setup", SETUPS.values(), ids=SETUPS)
def test_each_token_is_forced_as_its_request_says(setup: Setup) -> None:
    more = [*FORCED, SESSION] if "session" in setup.also else FORCED

    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(sequences(setup, more))
    def interleave(operations: list[Any]) -> None:
        with running(setup) as engine:
            for name, arguments, named in operations:
                getattr(engine, name)(*arguments, **named)
            engine.drain()
            engine.check()

    interleave()


def test_worker_has_no_rows_of_cached_tokens() -> None:
    """Two requests with the same tokens and routes: the second one brings the rest."""
    with running(Setup()) as engine:
        prompt = list(range(22))
        for length in (22, 17):
            engine.add(prompt[:length], 1, forced=(0, 0, length))
            engine.step([])
            rows = engine.runner.state._requests.get("1")
            engine.drain()
        assert rows is None  # computed at once, all but the cached blocks
        assert engine.runner.firsts == {"0": 0, "1": 16}


SCORES = st.floats(-30, 30, width=32)


@settings(max_examples=EXAMPLES, deadline=None, derandomize=True, database=None)
@given(
    logits=st.lists(SCORES, min_size=EXPERTS, max_size=EXPERTS),
    ids=st.permutations(range(EXPERTS)),
    scoring=st.sampled_from(["softmax", "sigmoid"]),
    renormalize=st.booleans(),
    scale=st.sampled_from([1.0, 2.5]),
)
def test_forced_experts_are_weighed_as_the_router_weighs_its_own(
    logits: list[float], ids: list[int], scoring: str, renormalize: bool, scale: float
) -> None:
    chosen = ids[:TOP_K]
    found = weigh_experts(
        torch.tensor([logits]),
        torch.tensor([chosen]),
        scoring_func=scoring,
        renormalize=renormalize,
        routed_scaling_factor=scale,
    )[0].numpy()
    exact = np.exp(np.array(logits, np.float64))
    scores = exact / exact.sum() if scoring == "softmax" else exact / (1 + exact)
    expected = scores[chosen] / (scores[chosen].sum() if renormalize else 1) * scale
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-30)
