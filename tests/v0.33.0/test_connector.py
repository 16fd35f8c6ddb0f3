# SPDX-License-Identifier: Apache-2.0
"""The scheduler with both sides of its connector, in random interleavings, against a naive model:
no row lost, doubled, invented, taken from another request or from other weights.

The model runner is ours (`Runner`); scheduler, scheduler-side and worker-side connector are those
that are installed. The setups of `PLAIN` hold on the release as well, those of `MENDED` do not:
`test_release.py` shows it.
"""

from __future__ import annotations

import os
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, reject, settings
from hypothesis import strategies as st
from vllm.config import VllmConfig
from vllm.distributed.aux_output_connector import connector as connector_side
from vllm.distributed.aux_output_connector import worker as worker_side
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
)
from vllm.v1.outputs import DraftTokenIds, KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from harness import scheduling
from tests.property.sequence import VOCABULARY, next_token, propose, true_row

BLOCK = 4
MAX_LEN = 48
EXAMPLES = int(os.environ.get("PROPERTY_EXAMPLES", "150"))
# Tokens that end a session's part.
STOPS = list(range(0, VOCABULARY, 3))
# The rows of tokens whose KV was received or did not load, and of those computed from the latter.
GARBAGE = np.full((2, 2), 0xFFFF, dtype=np.uint16)
ENCODER, DECODER = MsgpackEncoder(), MsgpackDecoder(EngineCoreOutputs)
# What the test does not try, or does not compare, and why. Nothing else is left out.
LEFT_OUT = {
    "abort beside lost KV": "The release caches the blocks that a request was loading when it ends "
    "(kv-load failures downstream). Of requests that share a lost block it lets one compute the "
    "block, and the others use it though that one was aborted.",
    "preemption beside lost KV": "The same: the release keeps the lost block in the prefix cache.",
    "load that fails within an asynchronous step": "vLLM issue 49250: steps in flight run on KV "
    "that is not there.",
    "reset beside requests that wait with KV": "The release refuses it with an error, after it has "
    "preempted the running requests; they begin again all the same.",
    "sessions that wait for each other's KV": "The release never frees the KV of a session that "
    "waits: where each needs more, all wait for ever.",
    "block that another request computed again with other weights": "Only where weights change "
    "without a reset: rows of a block are kept by its hash, so a request that was not yet given "
    "them gets the latest ones.",
}


def left_out(case: str, applies: object = True) -> bool:
    assert case in LEFT_OUT
    return bool(applies)


@dataclass(frozen=True)
class Setup:
    """How an engine runs, and what may happen to it."""

    asynchronous: bool = False
    # Steps that may be on their way at a time.
    depth: int = 1
    drafts: int = 0
    num_blocks: int = 14
    chunk: int = 7
    connector: bool = False
    caching: bool = True
    # Tokens after a block that its hash covers, as with EAGLE.
    lookahead: int = 0
    # Kind and block size of each KV cache group; full attention decides which rows are known.
    groups: tuple[tuple[str, int], ...] = (("full", BLOCK),)
    # Requests get rows only if they ask for them.
    opt_in: bool = False
    # Tokens of a block hash, where it is not the greatest that fits all groups.
    match_unit: int | None = None
    # Operations beside requests, steps and aborts.
    also: tuple[str, ...] = ()

    @property
    def full_group(self) -> int:
        return [kind for kind, _ in self.groups].index("full")

    @property
    def full_block(self) -> int:
        return self.groups[self.full_group][1]


PLAIN = {
    "synchronous": Setup(),
    "synchronous, resets": Setup(also=("reset",)),
    "asynchronous": Setup(asynchronous=True, depth=2),
    "batch queue": Setup(depth=3),
    "drafts": Setup(drafts=3),
    "asynchronous drafts": Setup(asynchronous=True, depth=2, drafts=3),
    "KV connector": Setup(connector=True, also=("reload",)),
    "asynchronous failed loads": Setup(
        asynchronous=True, depth=2, drafts=2, connector=True, also=("reload", "fail")
    ),
}
MENDED = {
    # Synchronous and without drafts: the scheduler keeps every token that is computed, so that the
    # latest computation of a block is certain.
    "weights without a reset": Setup(also=("update",)),
    "silent requests": Setup(also=("preempt", "update", "silent")),
    "loads beside silent requests": Setup(connector=True, also=("reload", "silent")),
    "resets with a step in flight": Setup(asynchronous=True, depth=2, also=("reset",)),
    "failed loads": Setup(connector=True, also=("preempt", "reload", "fail")),
    "asynchronous sessions": Setup(asynchronous=True, depth=2, also=("preempt", "session")),
    "remote prefills": Setup(connector=True, also=("receive", "reload", "silent", "fail")),
    "asynchronous remote prefills": Setup(
        asynchronous=True,
        depth=2,
        drafts=2,
        connector=True,
        also=("receive", "session", "silent", "reset"),
    ),
    "without prefix caching": Setup(
        asynchronous=True, depth=2, drafts=2, caching=False, also=("preempt", "session", "silent")
    ),
    "hashes with lookahead": Setup(drafts=3, lookahead=1),
    "asynchronous hashes with lookahead": Setup(
        asynchronous=True, depth=2, drafts=3, lookahead=3, also=("silent",)
    ),
    "opt-in": Setup(asynchronous=True, depth=2, opt_in=True, also=("preempt", "session", "silent")),
    "everything": Setup(
        asynchronous=True, depth=3, drafts=2, also=("preempt", "reset", "session", "silent")
    ),
}
FULL, WINDOW, MAMBA = ("full", 2 * BLOCK), ("window", BLOCK), ("mamba", 2 * BLOCK)
HYBRID = {
    "window after full": Setup(
        groups=(FULL, WINDOW), num_blocks=28, also=("preempt", "update", "silent")
    ),
    "window before full": Setup(groups=(WINDOW, FULL), num_blocks=28, also=("update", "silent")),
    "large window blocks": Setup(
        groups=(("full", BLOCK), ("window", 2 * BLOCK)), num_blocks=28, also=("update", "silent")
    ),
    "asynchronous window": Setup(
        asynchronous=True,
        depth=2,
        drafts=2,
        groups=(WINDOW, FULL),
        num_blocks=28,
        also=("preempt", "reset", "session", "silent"),
    ),
    # Hits may end within a block, whose KV the request then copies.
    "state after full": Setup(
        groups=(FULL, MAMBA),
        match_unit=BLOCK,
        num_blocks=28,
        chunk=12,
        also=("preempt", "update", "silent"),
    ),
    "state before full": Setup(
        groups=(MAMBA, FULL), match_unit=BLOCK, num_blocks=28, chunk=12, also=("update", "silent")
    ),
    "asynchronous state": Setup(
        asynchronous=True,
        depth=2,
        groups=(MAMBA, FULL),
        match_unit=BLOCK,
        num_blocks=28,
        chunk=12,
        also=("preempt", "reset", "session", "silent"),
    ),
    # The last window of a hit is computed again, as in DeepSeek-V4.1.
    "replayed window": Setup(
        groups=(("full", BLOCK), ("replay", BLOCK)), num_blocks=28, also=("preempt", "silent")
    ),
    "asynchronous replayed window": Setup(
        asynchronous=True,
        depth=2,
        drafts=2,
        groups=(("full", 2 * BLOCK), ("replay", BLOCK)),
        num_blocks=28,
        also=("preempt", "reset", "silent"),
    ),
    "window without prefix caching": Setup(
        caching=False, groups=(WINDOW, FULL), num_blocks=28, also=("silent",)
    ),
}
SETUPS = PLAIN | MENDED | HYBRID


@pytest.fixture(scope="module", autouse=True)
def block_hashes() -> None:
    init_none_hash(sha256)


@cache
def make_config(setup: Setup) -> tuple[VllmConfig, KVCacheConfig]:
    config = scheduling.make_config(
        num_blocks=setup.num_blocks,
        block_size=setup.full_block,
        max_model_len=MAX_LEN,
        max_num_seqs=6,
        batch=setup.chunk,
        caching=setup.caching,
        asynchronous=setup.asynchronous,
    )
    config.cache_config.prefix_match_unit = setup.match_unit
    config.cache_config.mamba_cache_mode = "align" if setup.caching else "none"
    config.scheduler_config.watermark = 0.0
    if setup.opt_in:
        config.aux_output_config.routed_experts_opt_in = True
    groups = [KVCacheGroupSpec([kind], make_spec(kind, size)) for kind, size in setup.groups]
    return config, KVCacheConfig(setup.num_blocks, [], groups)


def make_spec(kind: str, block_size: int) -> KVCacheSpec:
    if kind == "mamba":
        return MambaSpec(
            block_size=block_size, shapes=((1,),), dtypes=(torch.float32,), mamba_cache_mode="align"
        )
    shape = {"num_kv_heads": 1, "head_size": 1, "dtype": torch.float32}
    if kind == "replay":
        return SlidingWindowMLASpec(
            block_size=block_size, sliding_window=2 * BLOCK, bounded_replay=True, **shape
        )
    if kind == "window":
        return SlidingWindowSpec(block_size=block_size, sliding_window=6, **shape)
    return FullAttentionSpec(block_size=block_size, **shape)


def make_scheduler(setup: Setup, config: VllmConfig, kv_cache: KVCacheConfig) -> Scheduler:
    scheduler = scheduling.make_scheduler(config, kv_cache, setup.drafts)
    if setup.connector:
        scheduler.connector = Connector()
        scheduler.recompute_kv_load_failures = True
        scheduler.aux_output_connector = connector_side.AuxOutputSchedulerConnector(
            scheduler.kv_cache_manager, scheduler.connector
        )
    return scheduler


@dataclass
class Connector:
    """Has the KV of every other prompt, at once or a step later, and the KV of remote prefills."""

    # By request: indices of the blocks whose load the last pass began.
    loads: dict[str, range] = field(default_factory=dict)
    found_from: int = 0

    def get_num_new_matched_tokens(self, request: Request, num_computed: int) -> tuple[int, bool]:
        kind = int(request.request_id) % 4
        remote = request.kv_transfer_params or {}
        if kind < 2 and not remote.get("do_remote_prefill"):
            return 0, False
        self.found_from = num_computed
        if kind < 2:
            # Models with a state receive all but the last token.
            found = request.num_prompt_tokens - kind - num_computed
            return max(found, 0), found > 0
        # Only a load between steps may bring the whole prompt.
        found = (request.num_prompt_tokens - (kind == 2)) // BLOCK * BLOCK - num_computed
        return max(found, 0), kind == 3 and found > 0

    def update_state_after_alloc(self, request: Request, blocks: Any, num_external: int) -> None:
        if num_external:
            stop = self.found_from + num_external
            self.loads[request.request_id] = range(self.found_from // BLOCK, -(-stop // BLOCK))
            if int(request.request_id) % 4 < 2:
                # Others can be loaded again.
                request.kv_transfer_params = {"do_remote_prefill": False}

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, None]:
        return False, None

    def take_events(self) -> tuple[()]:
        return ()

    def get_loaded_kv_cache_group_ids(self, request: Request) -> tuple[int, ...]:
        return (0,)

    def __getattr__(self, name: str) -> Any:
        """Nothing to do or to say for the rest."""
        return lambda *args, **kwargs: None


@dataclass
class Step:
    """A step on its way."""

    scheduled: SchedulerOutput
    output: ModelRunnerOutput
    pending: Any
    # By request: the rows with which the KV of its positions was computed, this step included.
    truth: dict[str, np.ndarray]
    # By request: the first token that it computed, after what it found or received.
    firsts: dict[str, int]

    def consume(self) -> None:
        """What the output thread does when the copy has arrived."""
        if self.pending is not None:
            self.output.aux_output_connector_output = self.pending.process_output()
            self.pending = None


class Runner:
    """Runs steps as the model runner does, with the worker's side of the connector."""

    def __init__(self, setup: Setup, config: VllmConfig, kv_cache: KVCacheConfig) -> None:
        self.weights = 0
        self.tokens: dict[str, list[int]] = {}
        self.num_prompt_tokens: dict[str, int] = {}
        self.block_size = setup.full_block
        # The rows with which the KV of each block of full attention was computed.
        self.kv = np.tile(GARBAGE, (setup.num_blocks, self.block_size, 1, 1))
        self.firsts: dict[str, int] = {}
        # Tokens that were computed, less rejected drafts.
        self.num_done: dict[str, int] = {}
        # The worker makes the drafts itself, of which the scheduler knows the number only.
        self.proposes = setup.asynchronous and setup.drafts > 0
        self.draft_is_right: list[bool] = []
        # The blocks that a KV connector can load, named by all tokens up to their end.
        self.saved: dict[tuple[int, ...], np.ndarray] = {}
        self.rows = np.empty((0, 2, 2), np.uint16)
        self.connector = scheduling.make_worker_connector(
            config, kv_cache, (2, 2), "uint16", self.snapshot, setup.depth
        )

    def snapshot(self, count: int, rows: np.ndarray | None = None) -> torch.Tensor:
        return torch.from_numpy(self.rows[:count] if rows is None else self.rows[rows])

    def execute(
        self, scheduled: SchedulerOutput, block_ids: dict[str, list[int]], spoiled: set[str]
    ) -> Step:
        """Process the scheduled tokens; sample where the last known one is among them.

        Args:
            scheduled: the step.
            block_ids: the KV blocks of each request.
            spoiled: requests whose KV did not load.
        """
        starts = self._update(scheduled)
        for copy in scheduled.kv_cache_block_copies or ():
            self.kv[copy.dst_block_id] = self.kv[copy.src_block_id]
        self.connector.begin_step(scheduled.aux_output_connector_metadata)
        req_ids = list(scheduled.num_scheduled_tokens)
        fresh = {new.req_id for new in scheduled.scheduled_new_reqs}
        rows, sampled, rejected = [], [], []
        for req_id in req_ids:
            count = scheduled.num_scheduled_tokens[req_id]
            start = min(starts[req_id], self.num_done.get(req_id, starts[req_id]))
            stop = start + count
            known = self.tokens[req_id]
            drafts = scheduled.scheduled_spec_decode_tokens.get(req_id, [])
            if self.proposes and req_id not in fresh:  # theirs are padding
                drafts = propose(known, self.draft_is_right[: len(drafts)])
            fed = [*known, *drafts]
            for position in range(start, stop):
                row = GARBAGE if req_id in spoiled else true_row(fed, position, self.weights)
                rows.append(row)
                index, place = divmod(position, self.block_size)
                self.kv[block_ids[req_id][index], place] = row
            tokens: list[int] = []
            if stop >= len(known):
                tokens.append(next_token(known))
                for draft in drafts:
                    if draft != tokens[-1]:
                        break
                    tokens.append(next_token([*known, *tokens]))
                known += tokens
            done = min(stop, len(known) - 1)
            self.num_done[req_id] = done
            sampled.append(tokens)
            rejected.append(stop - done)
            for index in range(start // self.block_size, done // self.block_size):
                block = self.kv[block_ids[req_id][index]]
                if not (block == GARBAGE).all((1, 2)).any():
                    self.saved[tuple(known[: (index + 1) * self.block_size])] = block.copy()
        pending = None
        if req_ids:
            counts = [scheduled.num_scheduled_tokens[req_id] for req_id in req_ids]
            self.rows = np.stack(rows)
            pending = self.connector.prepare_output(
                SimpleNamespace(
                    req_ids=req_ids,
                    query_start_loc_np=np.cumsum([0, *counts]),
                    num_computed_tokens_np=np.array([starts[req_id] for req_id in req_ids]),
                )
            )
        if pending is not None:
            pending.enqueue_cpu_copy(np.array([len(t) for t in sampled]), np.array(rejected))
        output = ModelRunnerOutput(
            req_ids=req_ids,
            req_id_to_index={req_id: i for i, req_id in enumerate(req_ids)},
            sampled_token_ids=sampled,
        )
        truth = {
            req_id: self.kv[block_ids[req_id]].reshape(-1, 2, 2)[: self.num_done[req_id]]
            for req_id in req_ids
        }
        return Step(scheduled, output, pending, truth, dict(self.firsts))

    def load(self, tokens: list[int], block_ids: list[int], indices: range) -> None:
        """Load some of a request's blocks. Blocks that another engine computed are unknown."""
        for index in indices:
            name = tuple(tokens[: (index + 1) * BLOCK])
            self.kv[block_ids[index]] = self.saved.get(name, GARBAGE)

    def _update(self, scheduled: SchedulerOutput) -> dict[str, int]:
        """Take over what the scheduler says of requests; the first position of each."""
        for req_id in {*scheduled.finished_req_ids, *(scheduled.preempted_req_ids or ())}:
            self.num_done.pop(req_id, None)
        starts = {}
        for new in scheduled.scheduled_new_reqs:
            req_id, start = new.req_id, new.num_computed_tokens
            tokens = list(new.prefill_token_ids)
            self.tokens[req_id] = tokens
            self.num_prompt_tokens[req_id] = len(new.prompt_token_ids)
            self.num_done[req_id] = starts[req_id] = self.firsts[req_id] = start
        cached = scheduled.scheduled_cached_reqs
        for req_id, start, num_output_tokens in zip(
            cached.req_ids, cached.num_computed_tokens, cached.num_output_tokens, strict=True
        ):
            # The scheduler threw away what was sampled from KV that did not load.
            del self.tokens[req_id][self.num_prompt_tokens[req_id] + num_output_tokens :]
            starts[req_id] = start
        return starts


class Engine:
    """Scheduler and runner, with steps on their way, and what the clients were handed."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        config, kv_cache = make_config(setup)
        self.scheduler = make_scheduler(setup, config, kv_cache)
        self.block_hasher = (
            get_request_block_hasher(self.scheduler.hash_block_size, sha256, setup.lookahead)
            if setup.caching
            # The release has none.
            else kv_cache_utils.get_private_block_hasher(
                connector_side.get_aux_output_block_size(kv_cache, config)
            )
        )
        self.runner = Runner(setup, config, kv_cache)
        self.requests: dict[str, Request] = {}
        self.asking: set[str] = set()
        self.steps: deque[Step] = deque()
        # Position after the last row that each client was handed.
        self.ends: dict[str, int] = {}
        # Position of the first row that each client asked for.
        self.starts: dict[str, int] = {}
        # Index of the block that the next load loses.
        self.lose: int | None = None
        # Blocks whose KV did not load, or was computed from such KV.
        self.spoiled: set[int] = set()

    def make_request(self, req_id: str, prompt: list[int], max_tokens: int, **more: Any) -> Request:
        session = more.pop("session", False)
        # A stop that the scheduler does not foresee finds steps on their way.
        more["stop_token_ids"] = STOPS if session else []
        return Request(
            request_id=req_id,
            prompt_token_ids=list(prompt),
            sampling_params=SamplingParams(max_tokens=max_tokens, ignore_eos=True, **more),
            pooling_params=None,
            # There are two API servers.
            client_index=int(req_id) % 2,
            block_hasher=self.block_hasher,
            resumable=session,
        )

    def add(self, prompt: list[int], max_tokens: int, start: int = 0, **more: Any) -> None:
        asks = more.get("return_routed_experts") is not False
        if not asks and "silent" not in self.setup.also:
            return
        if self.setup.opt_in:
            more["return_routed_experts"] = True if asks else None
        req_id = str(len(self.requests))
        start = min(start, len(prompt))
        request = self.make_request(
            req_id, prompt, max_tokens, routed_experts_prompt_start=start, **more
        )
        self.requests[req_id] = request
        if asks:
            self.asking.add(req_id)
        self.starts[req_id] = self.ends[req_id] = start
        self.scheduler.add_request(request)

    def add_group(self, prompt: list[int], max_tokens: int, size: int) -> None:
        """Ask several times for the same prompt."""
        for _ in range(size):
            self.add(prompt, max_tokens)

    def add_turn(self, index: int, tail: list[int], max_tokens: int) -> None:
        """Continue what a request has so far."""
        if self.requests:
            prompt = [*self.requests[str(index % len(self.requests))].all_token_ids, *tail]
            if len(prompt) + max_tokens < MAX_LEN:
                self.add(prompt, max_tokens)

    def receive(
        self, prompt: list[int], max_tokens: int, start: int, session: bool, **more: Any
    ) -> None:
        """Ask for a prompt whose KV comes from a prefill engine."""
        self.add(
            prompt,
            max_tokens,
            start,
            session=session and "session" in self.setup.also,
            extra_args={"kv_transfer_params": {"do_remote_prefill": True}},
            **more,
        )

    def reload(self, prompt: list[int], kind: int, lose: int | None, received: bool) -> None:
        """Ask for a prompt whose KV has left the GPU: the connector loads it, or loses a block."""
        prompt = [*prompt, *range(2 * BLOCK)]
        if received and "receive" in self.setup.also:
            self.receive(prompt, 1, 0, session=False)
        else:
            self.add(prompt, 1)
        self.drain()
        self.add(list(range(VOCABULARY, VOCABULARY + MAX_LEN - 2)), 1)
        self.drain()
        while len(self.requests) % 4 != kind:
            self.add([1], 1)
        if lose is not None:
            self.fail(lose)
        self.add(prompt, 3)

    def converse(
        self, prompt: list[int], max_tokens: int, start: int, tails: list[list[int]]
    ) -> None:
        """Begin a session, whose next parts wait for it."""
        self.add(prompt, max_tokens, start, session=True)
        for tail in tails:
            self.extend(-1, tail, max_tokens, 0)

    def extend(self, index: int, tail: list[int], max_tokens: int, start: int) -> None:
        """Send the next part of a session."""
        open_sessions = self.open_sessions()
        if open_sessions:
            request = open_sessions[index % len(open_sessions)]
            new = SimpleNamespace(prompt_token_ids=tail, max_tokens=max_tokens)
            parts = [*request.streaming_queue, new]
            more = sum(len(part.prompt_token_ids) + part.max_tokens for part in parts)
            if request.num_prompt_tokens + request.max_tokens + more < MAX_LEN:
                self.scheduler.add_request(
                    self.make_request(
                        request.request_id,
                        tail,
                        max_tokens,
                        session=True,
                        routed_experts_prompt_start=min(start, len(tail)),
                    )
                )

    def open_sessions(self) -> list[Request]:
        return [
            request
            for request in self.requests.values()
            if request.resumable
            and not request.is_finished()
            and None not in request.streaming_queue
        ]

    def schedule(self, draft_is_right: list[bool]) -> None:
        if self.scheduler.has_unfinished_requests():
            self.step(draft_is_right)
        while len(self.steps) >= self.setup.depth:
            self.deliver()

    def step(self, draft_is_right: list[bool]) -> None:
        self.runner.draft_is_right = draft_is_right
        if self.setup.drafts and not self.runner.proposes:
            running = self.scheduler.running
            is_right = draft_is_right[: self.setup.drafts]
            drafts = [propose(request.all_token_ids, is_right) for request in running]
            self.scheduler.update_draft_token_ids(
                DraftTokenIds([request.request_id for request in running], drafts)
            )
        scheduled = self.scheduler.schedule()
        if left_out("preemption beside lost KV", self.spoiled and scheduled.preempted_req_ids):
            reject()
        loads = {}
        if self.setup.connector:
            loads, self.scheduler.connector.loads = self.scheduler.connector.loads, {}
        block_ids = {
            req_id: self.scheduler.kv_cache_manager.get_block_ids(req_id)[self.setup.full_group]
            for req_id in {*loads, *scheduled.num_scheduled_tokens}
        }
        loaded, spoiled = self.load(scheduled, loads, block_ids)
        step = self.runner.execute(scheduled, block_ids, spoiled)
        step.output.kv_connector_output = loaded
        self.steps.append(step)

    def load(
        self, scheduled: SchedulerOutput, loads: dict[str, range], block_ids: dict[str, list[int]]
    ) -> tuple[KVConnectorOutput | None, set[str]]:
        """What the KV connector did in the step, and the requests that use what it lost."""
        if not self.setup.connector:
            return None, set()
        lost = set()
        received = loads.keys() - scheduled.num_scheduled_tokens
        may_fail = loads.keys()
        if left_out("load that fails within an asynchronous step", self.setup.asynchronous):
            may_fail = received
        if may_fail and self.lose is not None:
            req_id = next(req_id for req_id in loads if req_id in may_fail)
            lost = {block_ids[req_id][loads[req_id][self.lose % len(loads[req_id])]]}
            self.lose = None
        for req_id, indices in loads.items():
            self.runner.load(self.requests[req_id].all_token_ids, block_ids[req_id], indices)
            self.spoiled -= {block_ids[req_id][i] for i in indices}
        self.runner.kv[[*lost]] = GARBAGE
        self.spoiled |= lost
        spoiled = set()
        # Who shares a block comes after the request that computes it.
        for req_id, count in scheduled.num_scheduled_tokens.items():
            computed = self.requests[req_id].num_computed_tokens - count
            written = block_ids[req_id][computed // BLOCK : -(-(computed + count) // BLOCK)]
            if self.spoiled & {*block_ids[req_id][: -(-computed // BLOCK)]}:
                spoiled.add(req_id)
                self.spoiled |= {*written}
            else:
                self.spoiled -= {*written}
        return KVConnectorOutput(finished_recving=received, invalid_block_ids=lost), spoiled

    def fail(self, block: int) -> None:
        if "fail" in self.setup.also:
            self.lose = block

    def consume(self) -> None:
        """The copy of the oldest rows arrives, before the scheduler asks for them."""
        for step in self.steps:
            if step.pending is not None:
                step.consume()
                return

    def deliver(self) -> None:
        if not self.steps:
            return
        step = self.steps.popleft()
        step.consume()
        messages = self.scheduler.update_from_output(step.scheduled, step.output)
        # As they reach the API servers.
        clients = [DECODER.decode(ENCODER.encode(message)) for message in messages.values()]
        for client in clients:
            # In the release they come with each output.
            getattr(client, "distribute_routed_experts", lambda: None)()
        for output in (output for client in clients for output in client.outputs):
            request = self.requests[output.request_id]
            if output.routed_experts is None:
                continue
            assert output.request_id in self.asking
            start = self.ends[output.request_id]
            if not isinstance(output.routed_experts, np.ndarray):  # one array in the release
                if stated := output.routed_experts.start:
                    assert stated <= step.firsts[output.request_id]
                    start = max(start, stated)
                output.routed_experts = np.concatenate(output.routed_experts.pieces)
            self.ends[output.request_id] = end = start + len(output.routed_experts)
            truth = step.truth[output.request_id][start:end]
            assert not (truth == GARBAGE).all((1, 2)).any()
            case = "block that another request computed again with other weights"
            if left_out(case, "update" in self.setup.also):
                truth = self.computed_again(request, start, output.routed_experts, truth)
            np.testing.assert_array_equal(output.routed_experts, truth)

    def computed_again(
        self, request: Request, start: int, rows: np.ndarray, truth: np.ndarray
    ) -> np.ndarray:
        """The truth. A block has the rows of its last computation if the request was given all of
        them."""
        truth, size = truth.copy(), self.setup.full_block
        for block in range(start // size, -(-(start + len(truth)) // size)):
            name = tuple(request.all_token_ids[: (block + 1) * size])
            if len(name) == (block + 1) * size and name in self.runner.saved:
                first = max(block * size, start)
                last = min((block + 1) * size, start + len(truth))
                saved = self.runner.saved[name][first - block * size : last - block * size]
                if (rows[first - start : last - start] == saved).all():
                    truth[first - start : last - start] = saved
        return truth

    def abort(self, index: int) -> None:
        if not self.requests or left_out("abort beside lost KV", self.uses_lost_kv()):
            return
        req_id = str(index % len(self.requests))
        self.scheduler.finish_requests(req_id, RequestStatus.FINISHED_ABORTED)

    def uses_lost_kv(self) -> bool:
        held = {
            block
            for req_id in self.scheduler.requests
            for block in self.scheduler.kv_cache_manager.get_block_ids(req_id)[
                self.setup.full_group
            ]
        }
        return bool(self.spoiled and (self.steps or self.spoiled & held))

    def preempt(self, index: int) -> None:
        """As the scheduler does for want of blocks, or for a request of higher priority."""
        running = self.scheduler.running
        if not running or left_out("preemption beside lost KV", self.uses_lost_kv()):
            return
        request = running.pop(index % len(running))
        self.scheduler._preempt_request(request, 0.0)
        self.scheduler.prev_step_scheduled_req_ids.discard(request.request_id)

    def reset(self, running: bool) -> None:
        """The weights change; the prefix cache is reset, and running requests begin again."""
        if "reset" in self.setup.also:
            with suppress(RuntimeError):
                self.runner.weights += self.scheduler.reset_prefix_cache(running)
                return
            assert left_out("reset beside requests that wait with KV", running)

    def reset_beside_waiting(self, prompt: list[int]) -> None:
        """A session that waits for its next part makes a reset fail while another request runs."""
        if "session" not in self.setup.also:
            return
        self.converse(prompt, 1, 0, [])
        for _ in range(10):
            self.schedule([])
        self.add(prompt, 4)
        self.schedule([])
        self.reset(running=True)

    def update(self) -> None:
        """The weights change while no request is there, without a reset."""
        if "update" in self.setup.also:
            self.drain()
            self.runner.weights += 1

    def drain(self) -> None:
        for request in self.open_sessions():
            self.scheduler.add_request(self.make_request(request.request_id, [], 1))
        for _ in range(500):
            if not (self.scheduler.has_unfinished_requests() or self.steps):
                return
            if self.scheduler.has_unfinished_requests():
                self.schedule([True] * self.setup.drafts)
                self.abort_stuck_session()
            else:
                self.deliver()
        raise AssertionError("the scheduler does not finish its requests")

    def abort_stuck_session(self) -> None:
        waiting = self.scheduler.kv_holding_waiting
        in_flight = any(step.scheduled.total_num_scheduled_tokens for step in self.steps)
        loaded = self.scheduler.finished_recving_kv_req_ids
        loads = any(
            r.status == RequestStatus.WAITING_FOR_REMOTE_KVS and r.request_id not in loaded
            for r in waiting
        )
        stuck = waiting and not (loads or in_flight or self.scheduler.running)
        if left_out("sessions that wait for each other's KV", stuck):
            req_id = waiting.peek_request().request_id
            self.scheduler.finish_requests(req_id, RequestStatus.FINISHED_ABORTED)

    def check(self) -> None:
        """Everybody has all rows that were asked for, and nothing is left of the requests."""
        for req_id, request in self.requests.items():
            if req_id in self.asking and request.status != RequestStatus.FINISHED_ABORTED:
                assert self.ends[req_id] == max(request.num_tokens - 1, self.starts[req_id])
        self.step([])  # brings the worker the end of the last requests
        worker, scheduler_side = self.runner.connector, self.scheduler.aux_output_connector
        worker._store._queue.join()
        assert not worker._requests
        assert not worker._pending_outputs
        assert len(worker._buffer._free_slots) == len(worker._buffer._rows)
        for request in self.requests.values():
            self.check_stored(request)
        kept = [
            key
            for block_hash, keys in scheduler_side._kv_cached.items()
            for key in keys or [block_hash]  # the release has several
        ]
        keys = worker_side.routed_experts_keys(kept, str(scheduler_side._generation))
        assert worker._store._store._references == dict.fromkeys(keys, 1)

    def check_stored(self, request: Request) -> None:
        """Every cached block of the request whose rows were captured has its own."""
        store = self.runner.connector._store
        pool = self.scheduler.kv_cache_manager.block_pool
        generation = str(self.scheduler.aux_output_connector._generation)
        step = self.setup.full_block // self.scheduler.hash_block_size
        for block_hash in request.block_hashes[step - 1 :: step] if step else ():
            cached = pool.get_cached_block(block_hash, [self.setup.full_group])
            if cached is None or not getattr(cached[0], "has_aux_output", True):
                continue
            data = store.get_concatenated(worker_side.routed_experts_keys([block_hash], generation))
            rows = np.frombuffer(data, np.uint16).reshape(-1, 2, 2)
            np.testing.assert_array_equal(rows, self.runner.kv[cached[0].block_id])


# Few different tokens at few lengths: requests share prefixes often.
PROMPTS = st.builds(
    lambda family, length, tail: [(family * 7 + i) % VOCABULARY for i in range(length)] + tail,
    st.integers(0, 1),
    st.integers(1, 24),
    st.lists(st.integers(0, 3), max_size=2),
)
TAILS = st.lists(st.integers(0, 3), min_size=1, max_size=3)
DRAFTS = st.lists(st.booleans(), min_size=3, max_size=3)
STARTS = st.sampled_from([0, 0, 0, 5, 100])


def operation(name: str, *arguments: Any, **more: Any) -> st.SearchStrategy[Any]:
    return st.tuples(st.just(name), st.tuples(*arguments), st.fixed_dictionaries(more))


COMMON = [
    operation("add", PROMPTS, st.integers(1, 12), STARTS),
    operation("add", PROMPTS, st.integers(1, 12), STARTS),
    operation("add_group", PROMPTS, st.integers(1, 8), st.integers(2, 3)),
    operation("add_turn", st.integers(0, 20), TAILS, st.integers(1, 6)),
    *[operation("schedule", DRAFTS)] * 3,
    operation("consume"),
    operation("deliver"),
    operation("abort", st.integers(0, 20)),
]
MORE = {
    "silent": [operation("add", PROMPTS, st.integers(1, 12), return_routed_experts=st.just(False))],
    "session": [
        operation("converse", PROMPTS, st.integers(1, 6), STARTS, st.lists(TAILS, max_size=3)),
        *[operation("extend", st.integers(0, 5), TAILS, st.integers(1, 5), st.integers(0, 2))] * 2,
    ],
    "reset": [operation("reset", st.booleans()), operation("reset_beside_waiting", PROMPTS)],
    "update": [operation("update")],
    "reload": [
        operation(
            "reload",
            PROMPTS,
            st.integers(2, 3),
            st.one_of(st.none(), st.integers(0, 5)),
            st.booleans(),
        )
    ],
    "receive": [
        operation("receive", PROMPTS, st.integers(1, 8), STARTS, st.booleans()),
        operation("receive", PROMPTS, st.integers(1, 8), STARTS, st.booleans()),
    ],
    "fail": [operation("fail", st.integers(0, 5))],
    "preempt": [operation("preempt", st.integers(0, 20))],
}


@pytest.mark.parametrize("setup", SETUPS.values(), ids=SETUPS)
def test_every_request_gets_exactly_its_rows(setup: Setup) -> None:
    operations = [*COMMON, *(operation for name in setup.also for operation in MORE[name])]

    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(st.lists(st.one_of(operations), min_size=4, max_size=40))
    def interleave(operations: list[tuple[str, tuple[Any, ...], dict[str, Any]]]) -> None:
        engine = Engine(setup)
        try:
            for name, arguments, more in operations:
                getattr(engine, name)(*arguments, **more)
            engine.drain()
            engine.check()
        finally:
            engine.runner.connector.close()

    interleave()


def test_request_that_is_preempted_in_its_own_pass_gets_its_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A pass schedules two blocks of a request, and preempts it for one of higher priority."""
    setup = Setup(num_blocks=9, chunk=12)
    config, _ = make_config(setup)
    monkeypatch.setattr(config.scheduler_config, "policy", "priority")
    monkeypatch.setattr(config.scheduler_config, "long_prefill_token_threshold", 8)
    engine = Engine(setup)
    try:
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
    finally:
        engine.runner.connector.close()
