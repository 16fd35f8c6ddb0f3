# SPDX-License-Identifier: Apache-2.0
"""The real scheduler in random interleavings, against the naive model: no row lost, doubled,
invented, taken from another request or from other weights.

`make mutants` breaks the code under test in named ways, each of which must fail here.
"""

from __future__ import annotations

import os
from collections import defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import (
    get_request_block_hasher,
    init_none_hash,
    make_block_hash_with_group_id,
)
from vllm.v1.core.routed_experts_kv_transfer import RoutedExpertsKVTransfer
from vllm.v1.core.routed_experts_rows import NEVER
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.engine.output_processor import OutputProcessor
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    SlidingWindowSpec,
)
from vllm.v1.outputs import DraftTokenIds, KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.routed_experts_params import get_routed_experts_start
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from harness import scheduling
from harness.scheduling import make_config, make_request
from tests.property.model import MOE_LAYERS, Worker
from tests.property.sequence import VOCABULARY, propose, true_row

BLOCK = 4
MAX_LEN = 48
EXAMPLES = int(os.environ.get("PROPERTY_EXAMPLES", "300"))
# Seed of the random cases. Without it, every run has the same ones.
SEED = os.environ.get("PROPERTY_SEED")


@dataclass(frozen=True)
class Setup:
    """How an engine runs; the parts that decide which interleavings there can be."""

    asynchronous: bool = False
    # Steps between being scheduled and having their output processed: the engine waits for
    # the oldest once there are this many.
    depth: int = 1
    drafts: int = 0
    num_blocks: int = 14
    chunk: int = 7
    caching: bool = True
    sliding_window: bool = False
    full_attention: bool = True
    priorities: bool = False
    connector: bool = False
    # A failed load ends the requests that relied on it; else they compute the tokens.
    loads_end: bool = False
    # Ranks that hold a part of each block's KV, in a smaller block of their own.
    context_parallel: int = 1
    num_seqs: int = 6
    # How many times the requests of a group that an operation asks for.
    crowd: int = 1


SETUPS = {
    "synchronous": Setup(),
    "asynchronous": Setup(asynchronous=True, depth=2),
    # Pipeline stages: several steps are on their way, also of a request that is preempted.
    "batch queue": Setup(depth=3),
    "asynchronous batch queue": Setup(asynchronous=True, depth=3),
    "drafts": Setup(drafts=3),
    # The worker proposes the drafts, and the scheduler learns later which were right.
    "asynchronous drafts": Setup(asynchronous=True, depth=2, drafts=3),
    "hybrid": Setup(sliding_window=True, num_blocks=24),
    # A hit holds the blocks of the window only: those before it may be evicted meanwhile.
    "window only": Setup(sliding_window=True, full_attention=False),
    # More requests at a time than there is room for at first.
    "crowd": Setup(num_blocks=160, chunk=40, num_seqs=40, crowd=8),
    # A request may be preempted in the pass that has scheduled it already.
    "priorities": Setup(priorities=True),
    "no prefix cache": Setup(caching=False),
    "decode context parallel": Setup(context_parallel=2),
    "KV connector": Setup(connector=True, num_blocks=80, chunk=24),
    "KV connector, no prefix cache": Setup(connector=True, num_blocks=40, caching=False),
    "KV connector, failed loads end": Setup(
        connector=True, num_blocks=80, chunk=24, loads_end=True
    ),
    "batch queue, failed loads end": Setup(
        depth=3, connector=True, num_blocks=80, chunk=24, loads_end=True
    ),
    "asynchronous, failed loads end": Setup(
        asynchronous=True, depth=2, connector=True, num_blocks=80, chunk=24, loads_end=True
    ),
}


@pytest.fixture(scope="module", autouse=True)
def block_hashes() -> None:
    init_none_hash(sha256)


@pytest.fixture(scope="module", autouse=True)
def small_arrays() -> Iterator[None]:
    """Two blocks of rows are as many as get an array of their own, and fill it."""
    size = 2 * BLOCK * true_row([0], 0, 0).nbytes
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("vllm.v1.core.routed_experts_rows.LARGE_ROWS", size)
        patch.setattr("vllm.v1.core.routed_experts_rows.MAX_ROWS_ARRAY", size)
        yield


def make_scheduler(setup: Setup) -> Scheduler:
    block_size = BLOCK // setup.context_parallel
    config = make_config(
        num_blocks=setup.num_blocks,
        block_size=block_size,
        max_model_len=MAX_LEN,
        max_num_seqs=setup.num_seqs,
        batch=setup.chunk,
        caching=setup.caching,
        asynchronous=setup.asynchronous,
    )
    config.scheduler_config.policy = "priority" if setup.priorities else "fcfs"
    config.parallel_config.decode_context_parallel_size = setup.context_parallel
    shape = {"block_size": block_size, "num_kv_heads": 1, "head_size": 1, "dtype": torch.float32}
    groups = []
    if setup.full_attention:
        groups.append(KVCacheGroupSpec(["full"], FullAttentionSpec(**shape)))
    if setup.sliding_window:
        groups.append(KVCacheGroupSpec(["window"], SlidingWindowSpec(**shape, sliding_window=6)))
    kv_cache = KVCacheConfig(setup.num_blocks, [], groups)
    scheduler = scheduling.make_scheduler(config, kv_cache, setup.drafts)
    assert scheduler.block_size == BLOCK
    if setup.connector:
        scheduler.connector = Connector()
        scheduler.routed_experts_kv_transfer = RoutedExpertsKVTransfer(
            scheduler.routed_experts, scheduler.connector
        )
        scheduler.recompute_kv_load_failures = not setup.loads_end
    return scheduler


@dataclass
class Connector:
    """Has the KV of every other prompt, at once or a step later. When it is first asked for a
    prompt, it has few blocks. When the request comes back, it has all that may be loaded."""

    # By request: indices of the blocks whose load the last pass began.
    loads: dict[str, range] = field(default_factory=dict)
    asked: set[str] = field(default_factory=set)
    # What was found for the request that is being scheduled.
    found: range = range(0)

    def get_num_new_matched_tokens(self, request: Request, num_computed: int) -> tuple[int, bool]:
        kind = int(request.request_id) % 4
        if kind < 2:
            return 0, False
        # Only a load between steps may bring the whole prompt.
        stop = (request.num_prompt_tokens - (kind == 2)) // BLOCK
        if request.request_id not in self.asked:
            stop = min(stop, 1 + len(self.asked) % 3)
            self.asked.add(request.request_id)
        self.found = range(num_computed // BLOCK, stop)
        return len(self.found) * BLOCK, kind == 3 and len(self.found) > 0

    def update_state_after_alloc(self, request: Request, blocks: Any, num_external: int) -> None:
        if num_external:
            self.loads[request.request_id] = self.found

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> None:
        return None

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, None]:
        return False, None

    def update_connector_output(self, output: KVConnectorOutput) -> None:
        pass

    def take_events(self) -> tuple[()]:
        return ()


class FrontEnd:
    """An API server, which gets the engine's messages as they come over the wire."""

    encoder, decoder = MsgpackEncoder(), MsgpackDecoder(EngineCoreOutputs)

    def __init__(self) -> None:
        self.processor = OutputProcessor(tokenizer=None, log_stats=False)
        self.rows: defaultdict[str, list[np.ndarray]] = defaultdict(list)
        self.finished: set[str] = set()

    def add(self, request: Request) -> None:
        core_request = make_request(
            request.request_id, request.prompt_token_ids, request.sampling_params
        )
        self.processor.add_request(core_request, None)

    def receive(self, outputs: EngineCoreOutputs) -> None:
        frames = [bytes(frame) for frame in self.encoder.encode(outputs)]
        message = self.decoder.decode(frames)
        self.processor.add_routed_experts(message)
        for output in self.processor.process_outputs(message.outputs).request_outputs:
            if (rows := output.outputs[0].routed_experts) is not None:
                self.rows[output.request_id].append(rows)
            if output.finished:
                self.finished.add(output.request_id)


@dataclass
class Engine:
    """Scheduler and worker, with steps on their way, and what the clients were handed."""

    setup: Setup
    worker: Worker = field(default_factory=Worker)
    front_ends: tuple[FrontEnd, ...] = field(default_factory=lambda: (FrontEnd(), FrontEnd()))
    requests: dict[str, Request] = field(default_factory=dict)
    handed: dict[str, list[np.ndarray]] = field(default_factory=dict)
    on_the_way: deque[tuple[SchedulerOutput, ModelRunnerOutput]] = field(default_factory=deque)
    # Position of the first row that each client was handed.
    starts: dict[str, int] = field(default_factory=dict)
    # Index of the external block that the next step fails to load.
    lose: int | None = None
    # Blocks whose KV was not loaded, or was computed from such KV.
    spoiled: set[int] = field(default_factory=set)
    # Requests that a failed load may have ended.
    ended: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.scheduler = make_scheduler(self.setup)
        self.worker.proposes = self.setup.asynchronous and self.setup.drafts > 0
        self.manager = self.scheduler.routed_experts
        self.manager.rows.reserve(2, 2, "uint16")

    def add(
        self,
        prompt: list[int],
        max_tokens: int,
        asks: bool = True,
        start: int = 0,
        salt: str | None = None,
        remote: bool = False,
    ) -> None:
        req_id = str(len(self.requests))
        start = min(start, len(prompt))
        request = Request(
            request_id=req_id,
            prompt_token_ids=prompt,
            sampling_params=SamplingParams(
                max_tokens=max_tokens,
                ignore_eos=True,
                detokenize=False,
                # Every other client reads a stream.
                output_kind=RequestOutputKind.FINAL_ONLY
                if len(self.requests) // 2 % 2
                else RequestOutputKind.DELTA,
                # As the input processor leaves them.
                return_routed_experts=True if asks else None,
                routed_experts_prompt_start=start if asks else None,
                extra_args={"kv_transfer_params": {"do_remote_prefill": remote}},
            ),
            pooling_params=None,
            # There are two API servers.
            client_index=len(self.requests) % 2,
            cache_salt=salt,
            # Later requests come first as often as not.
            priority=-len(self.requests) % 3,
            block_hasher=get_request_block_hasher(BLOCK, sha256),
        )
        self.requests[req_id] = request
        self.handed[req_id] = []
        self.scheduler.add_request(request)
        self.front_ends[request.client_index].add(request)

    def add_group(self, prompt: list[int], max_tokens: int, size: int) -> None:
        for _ in range(size * self.setup.crowd):
            self.add(list(prompt), max_tokens)

    def add_relay(self, prompt: list[int], num_cached: int, start: int, lose: int | None) -> None:
        """A silent request caches a prefix. Another one receives it nevertheless, because the rows
        are missing, and computes the blocks after it. A third request uses these blocks."""
        prompt = [*prompt, *range(3 * BLOCK)]
        self.add(prompt[: num_cached * BLOCK + 1], 5, asks=False)
        self.schedule([True] * self.setup.drafts)
        if lose is not None:
            self.fail(lose)
        self.add(prompt, 3, remote=True)
        self.add([*prompt, 1], 3, start=start * BLOCK)

    def add_turn(self, index: int, tail: list[int], max_tokens: int) -> None:
        """Continue what a request has so far."""
        if self.requests:
            request = self.requests[str(index % len(self.requests))]
            prompt = [*request.all_token_ids, *tail]
            if len(prompt) + max_tokens < MAX_LEN:
                self.add(prompt, max_tokens)

    def schedule(self, draft_is_right: list[bool]) -> None:
        if not self.scheduler.has_unfinished_requests():
            return
        self.worker.draft_is_right = draft_is_right
        if self.setup.drafts and not self.worker.proposes:
            self._propose(draft_is_right)
        scheduled = self.scheduler.schedule()
        output = self.worker.execute(scheduled)
        if self.setup.connector:
            self._load(scheduled, output)
        self.on_the_way.append((scheduled, output))
        while len(self.on_the_way) >= self.setup.depth:
            self.deliver()

    def fail(self, block: int) -> None:
        self.lose = block

    def _load(self, scheduled: SchedulerOutput, output: ModelRunnerOutput) -> None:
        """What the connector did in the step; what it lost spoils the requests that use it."""
        loads, self.scheduler.connector.loads = self.scheduler.connector.loads, {}
        block_ids = {
            req_id: self.scheduler.kv_cache_manager.get_block_ids(req_id)[0]
            for req_id in {*loads, *output.req_ids}
        }
        lost = set()
        if loads and self.lose is not None:
            req_id, blocks = next(iter(loads.items()))
            lost = {block_ids[req_id][blocks[self.lose % len(blocks)]]}
            self.lose = None
        output.kv_connector_output = KVConnectorOutput(
            finished_recving={r for r in loads if r not in output.req_ids}, invalid_block_ids=lost
        )
        if not self.setup.loads_end:
            # They are computed before anybody uses them.
            self.spoiled.clear()
        self.spoiled -= {block_ids[req_id][i] for req_id, blocks in loads.items() for i in blocks}
        self.spoiled |= lost
        first_row = 0
        # A request that shares a block comes after the request that computes it.
        for req_id in output.req_ids:
            count = scheduled.num_scheduled_tokens[req_id]
            computed = self.requests[req_id].num_computed_tokens - count
            asks = output.routed_experts is not None and req_id in output.routed_experts.req_ids
            used = block_ids[req_id][: -(-computed // BLOCK)]
            written = block_ids[req_id][computed // BLOCK : -(-(computed + count) // BLOCK)]
            if self.spoiled & {*used}:
                self.spoiled |= {*written}
                if asks:
                    output.routed_experts.rows[first_row : first_row + count] = 0xFFFF
            else:
                self.spoiled -= {*written}
            first_row += count if asks else 0

    def _propose(self, draft_is_right: list[bool]) -> None:
        running = self.scheduler.running
        is_right = draft_is_right[: self.setup.drafts]
        drafts = [propose(request.all_token_ids, is_right) for request in running]
        self.scheduler.update_draft_token_ids(
            DraftTokenIds([request.request_id for request in running], drafts)
        )

    def deliver(self) -> None:
        if not self.on_the_way:
            return
        scheduled, output = self.on_the_way.popleft()
        outputs = self.scheduler.update_from_output(scheduled, output)
        failed = (output.kv_connector_output or KVConnectorOutput()).invalid_block_ids
        if failed and self.setup.loads_end:
            self.ended |= {r.request_id for r in self.requests.values() if is_error(r)}
        if output.routed_experts is not None:
            # The next step reuses its buffer: whoever kept a view of it is wrong now.
            output.routed_experts.rows[:] = 0xFFFF
        for index, client in outputs.items():
            packed = client.routed_experts
            self.front_ends[index].receive(client)
            if packed is None:
                continue
            assert packed.moe_layers == MOE_LAYERS
            all_rows = np.concatenate(packed.rows)
            begins = np.cumsum([0, *map(len, packed.rows)])
            for index, start, offset, num_rows in packed.slices:
                req_id = client.outputs[index].request_id
                rows = all_rows[offset : offset + num_rows]
                assert len(rows) == num_rows
                assert not ((begins > offset) & (begins < offset + num_rows)).any()
                chunks = self.handed[req_id]
                first = self.starts.setdefault(req_id, start)
                assert start == first + sum(map(len, chunks))
                # Whatever was computed before a weight update ended with it.
                assert (rows[:, 1, 1] == self.worker.weights).all()
                chunks.append(rows)

    def spoils_cache(self, request: Request) -> bool:
        """What a silent request computes from lost KV stays cached if it is preempted or ends."""
        asks = request.sampling_params.return_routed_experts
        return not asks and len(self.spoiled) > 0 and len(self.on_the_way) > 0

    def abort(self, index: int) -> None:
        req_id = str(index % len(self.requests)) if self.requests else ""
        if req_id and not self.spoils_cache(self.requests[req_id]):
            self.scheduler.finish_requests(req_id, RequestStatus.FINISHED_ABORTED)

    def preempt(self, index: int) -> None:
        """As the scheduler does for want of blocks, or for a request of higher priority."""
        running = self.scheduler.running
        if running and not self.spoils_cache(running[index % len(running)]):
            request = running.pop(index % len(running))
            self.scheduler._preempt_request(request, 0.0)
            self.scheduler.prev_step_scheduled_req_ids.discard(request.request_id)

    def reset(self, running: bool) -> None:
        loading = RequestStatus.WAITING_FOR_REMOTE_KVS
        kept = self.scheduler.requests.values()
        if running and any(r.status == loading or r.is_finished() for r in kept):
            # The release refuses it while KV is loading, with an error.
            return
        if self.scheduler.reset_prefix_cache(reset_running_requests=running):
            self.worker.weights += 1

    def drain(self) -> None:
        for _ in range(2000):
            if not (self.scheduler.has_unfinished_requests() or self.on_the_way):
                return
            self.schedule([True] * self.setup.drafts)
            self.deliver()
        raise AssertionError("the scheduler does not finish its requests")

    def check(self) -> None:
        """Every request has the rows of its tokens, all of them if nothing ended it."""
        for req_id, request in self.requests.items():
            assert not is_error(request) or req_id in self.ended
            rows = np.concatenate([np.empty((0, 2, 2), np.uint16), *self.handed[req_id]])
            tokens = list(request.all_token_ids)
            start = get_routed_experts_start(request.sampling_params)
            if start is None:
                assert len(rows) == 0
                continue
            asked, start = start, self.starts.get(req_id, start)
            assert start == asked or (
                asked < start < request.num_prompt_tokens
                and request.kv_transfer_params["do_remote_prefill"]
            )
            if request.status != RequestStatus.FINISHED_ABORTED and req_id not in self.ended:
                assert len(rows) == len(tokens) - 1 - start
            for position, row in enumerate(rows, start):
                weights = int(row[1, 1])
                np.testing.assert_array_equal(row, true_row(tokens, position, weights))
            front_end = self.front_ends[request.client_index]
            if req_id in front_end.finished:
                received = np.concatenate([rows[:0], *front_end.rows[req_id]])
                np.testing.assert_array_equal(received, rows)
            self.check_cached_blocks(request)
        assert not self.manager.requests
        assert not self.manager.num_received
        assert not self.manager.steps_in_flight

    def check_cached_blocks(self, request: Request) -> None:
        """Every cached block of the request that others may use has the rows of its tokens."""
        if not self.setup.caching:
            return
        tokens = list(request.all_token_ids)
        kept = self.manager.rows
        cached = self.scheduler.kv_cache_manager.block_pool
        hashes = request.block_hashes
        per_block = BLOCK // cached.hash_block_size
        for index in range(len(tokens) // BLOCK):
            block_hash = b"".join(hashes[index * per_block : (index + 1) * per_block])
            key = make_block_hash_with_group_id(block_hash, self.manager.group_id)
            block = cached.cached_block_hash_to_block.get_one_block(key)
            if block is None or kept.first_step[block.block_id] == NEVER:
                continue
            # No step is on its way.
            assert kept.first_step[block.block_id] == 0
            begin = block.block_id * BLOCK
            for position, row in enumerate(kept._rows[begin : begin + BLOCK], index * BLOCK):
                expected = true_row(tokens, position, self.worker.weights)
                np.testing.assert_array_equal(row, expected)


def is_error(request: Request) -> bool:
    return request.status == RequestStatus.FINISHED_ERROR


# Few different tokens at few lengths: requests share prefixes often, and end with a block.
PROMPTS = st.builds(
    lambda family, length, tail: [(family * 7 + i) % VOCABULARY for i in range(length)] + tail,
    st.integers(0, 1),
    st.one_of(st.sampled_from([BLOCK, 2 * BLOCK]), st.integers(1, 24)),
    st.lists(st.integers(0, 3), max_size=2),
)
TAILS = st.lists(st.integers(0, 3), min_size=1, max_size=3)


def operation(name: str, *arguments: Any) -> st.SearchStrategy[Any]:
    """A method of `Engine`, and arguments."""
    return st.tuples(st.just(name), *arguments)


OPERATIONS = st.one_of(
    operation(
        "add",
        PROMPTS,
        st.one_of(st.just(1), st.integers(1, 12)),
        st.sampled_from([True, True, True, False]),
        st.sampled_from([0, 0, 0, 5, 100]),
        st.sampled_from([None, None, None, "salt"]),
        st.booleans(),
    ),
    operation("add_group", PROMPTS, st.integers(1, 8), st.integers(2, 3)),
    operation(
        *("add_relay", PROMPTS, st.integers(1, 4), st.integers(1, 4)),
        st.sampled_from([None, 0, 1, 2]),
    ),
    operation("add_turn", st.integers(0, 20), TAILS, st.integers(1, 6)),
    *[operation("schedule", st.lists(st.booleans(), min_size=3, max_size=3)) for _ in range(3)],
    operation("deliver"),
    operation("abort", st.integers(0, 20)),
    operation("preempt", st.integers(0, 20)),
    operation("reset", st.booleans()),
    operation("fail", st.integers(0, 5)),
)


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
    @given(st.lists(OPERATIONS, min_size=4, max_size=40))
    def interleave(operations: list[tuple[Any, ...]]) -> None:
        engine = Engine(setup)
        for name, *arguments in operations:
            getattr(engine, name)(*arguments)
        engine.drain()
        engine.check()

    if SEED is not None:
        interleave = seed(int(SEED))(interleave)
    interleave()


def test_cached_prefix_is_used_with_decode_context_parallel() -> None:
    """All ranks together have one block of the prefix cache."""
    engine = Engine(Setup(context_parallel=2, num_blocks=80, chunk=64))
    prompt = list(range(3 * BLOCK + 1))
    for num_computed in (len(prompt), 1):
        engine.add(prompt, 3)
        scheduled = engine.scheduler.schedule()
        assert scheduled.total_num_scheduled_tokens == num_computed
        engine.on_the_way.append((scheduled, engine.worker.execute(scheduled)))
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
        scheduled = engine.scheduler.schedule()
        assert scheduled.total_num_scheduled_tokens == num_computed + 1
        engine.on_the_way.append((scheduled, engine.worker.execute(scheduled)))
        for _ in range(4):
            engine.schedule([])
    engine.drain()
    engine.check()
