# SPDX-License-Identifier: Apache-2.0
"""The engine of v0.33.0's property test: the scheduler and both sides of its connector, what may be
done with them, and what must hold. The setups use the scheduler and connector that are installed.
"""

from __future__ import annotations

from collections import Counter, deque
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import numpy as np
from hypothesis import reject
from vllm.config import VllmConfig
from vllm.distributed.aux_output_connector import connector as connector_side
from vllm.distributed.aux_output_connector.routed_experts import routed_experts_keys
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.kv_cache_utils import get_request_block_hasher
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutputs, FinishReason
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.outputs import DraftTokenIds, KVConnectorOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.routed_experts_record import take_ids, take_weights
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from harness import scheduling
from tests.sequence import VOCABULARY, propose
from tests.v0_33_0.connector.faults import Faults, recover
from tests.v0_33_0.connector.loads import Connector, Load
from tests.v0_33_0.connector.runner import (
    ANY,
    GARBAGE,
    RECORD,
    BlockIds,
    Runner,
    Step,
    weigh,
)
from tests.v0_33_0.connector.setups import BLOCK, MAX_LEN, Setup, left_out, make_config

# Why the computation that rows are of is not known.
UNKNOWN = (
    "computation KV that was loaded is of",
    "of two computations KV is of",
    "computation rows before a sliding window are of",
)
# Tokens that end a session's part.
STOPS = list(range(0, VOCABULARY, 3))
ENCODER, DECODER = MsgpackEncoder(), MsgpackDecoder(EngineCoreOutputs)
# What the sides of the connector know of requests. The release has few of these.
OF_WORKER = ("_requests", "_slots", "_states", "_pending_outputs")
OF_SCHEDULER = ("_sent_hash_counts", "_unsent_hashes", "_taken", "_takers", "_emitted")
# The release has no numbers of computations.
key_of = getattr(connector_side, "aux_output_key", lambda block_hash, number: block_hash)
OF_SCHEDULER += ("_rewound", "_finished_requests", "_loading", "_first_known")
OF_SCHEDULER += ("_kept_while_loading",)


def make_scheduler(setup: Setup, config: VllmConfig, kv_cache: KVCacheConfig) -> Scheduler:
    scheduler = scheduling.make_scheduler(config, kv_cache, setup.drafts)
    if setup.connector:
        scheduler.connector = Connector()
        scheduler.recompute_kv_load_failures = not setup.policy_fail
        scheduler.defer_block_free = setup.depth > 1
        scheduler.aux_output_connector = connector_side.AuxOutputSchedulerConnector(
            scheduler.kv_cache_manager, scheduler.connector
        )
    if setup.wide:
        scheduler.aux_output_connector.record = RECORD
    return scheduler


def assert_computed_with(rows: np.ndarray, truth: np.ndarray) -> None:
    """Check that rows are of the same computations as the truth, where these are known."""
    truth, unknown = truth.copy(), truth[:, 1, 1] == ANY
    if all(left_out(f"which {case}", unknown.any()) for case in UNKNOWN):
        truth[unknown, 1, 1] = rows[unknown, 1, 1]
    np.testing.assert_array_equal(rows, truth)


class Engine:
    """Scheduler and runner, with steps on their way, and what the clients were handed."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.config, kv_cache = make_config(setup)
        self.scheduler = make_scheduler(setup, self.config, kv_cache)
        self.block_hasher = (
            get_request_block_hasher(self.scheduler.hash_block_size, sha256, setup.lookahead)
            if setup.caching
            # The release has none.
            else kv_cache_utils.get_private_block_hasher(
                connector_side.get_aux_output_block_size(kv_cache, self.config)
            )
        )
        self.runner = Runner(setup, self.config, kv_cache)
        self.faults: Faults | None = None
        if "fault" in setup.also:
            self.faults = Faults(
                self.runner.connector, self.scheduler.aux_output_connector, self.note_fault
            )
        self.requests: dict[str, Request] = {}
        self.asking: set[str] = set()
        # Requests that may end with an error, and those that did.
        self.may_fail: set[str] = set()
        self.failed: set[str] = set()
        # The last step whose requests may lose rows by the latest fault.
        self.fails_until = -1
        self.steps: deque[Step] = deque()
        # Requests of the step whose output the scheduler gets.
        self.delivering: set[str] = set()
        # Position after the last row that each client was handed.
        self.ends: dict[str, int] = {}
        # Position of the first row that each client asked for.
        self.starts: dict[str, int] = {}
        # Loads on their way, and which block the next load loses.
        self.loads: dict[str, Load] = {}
        self.lose: int | None = None

    # Requests.

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
        if asks and self.gets_weights(req_id):
            more["return_routed_experts_weights"] = True
        request = self.make_request(
            req_id, prompt, max_tokens, routed_experts_prompt_start=start, **more
        )
        self.requests[req_id] = request
        if asks:
            self.asking.add(req_id)
        self.starts[req_id] = self.ends[req_id] = start
        self.scheduler.add_request(request)
        self.note_failing()

    def gets_weights(self, req_id: str) -> bool:
        return self.setup.wide and int(req_id) % 3 == 0

    def add_group(self, prompt: list[int], max_tokens: int, size: int) -> None:
        """Ask several times for the same prompt."""
        for _ in range(size):
            self.add(prompt, max_tokens)

    def compute_again(self, index: int, num_blocks: int) -> None:
        """Ask for the first blocks of a request's prompt: the last of them is computed again."""
        if self.requests:
            prompt = self.requests[str(index % len(self.requests))].prompt_token_ids
            size = self.setup.row_block
            if end := min(num_blocks, len(prompt) // size) * size:
                self.add(prompt[:end], 1)

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
        self.evict()
        if lose is not None:
            self.fail(lose)
        self.add_of_kind(kind, prompt)

    def evict(self) -> None:
        """Another prompt takes most blocks."""
        self.add(list(range(VOCABULARY, VOCABULARY + MAX_LEN - 2)), 1)
        self.drain()

    def add_of_kind(self, kind: int, prompt: list[int]) -> None:
        """Ask for a prompt that the KV connector treats so."""
        while len(self.requests) % 4 != kind:
            self.add([1], 1)
        self.add(prompt, 3)

    def abandon(
        self, prompt: list[int], kind: int, lose: int, preempt: bool, later: list[bool]
    ) -> None:
        """A request ends or is preempted while a load of its KV fails. Others, which may want no
        rows, have the same prompt."""
        self.reload(prompt, kind, lose, received=False)
        req_id = str(len(self.requests) - 1)
        self.step([])
        if preempt and self.setup.depth > 1:
            self.preempt(-1)
        else:
            self.scheduler.finish_requests(req_id, RequestStatus.FINISHED_ABORTED)
        self.make_room()
        for silent in later:
            more = {"return_routed_experts": False} if silent else {}
            self.add([*prompt, *range(2 * BLOCK)], 2, **more)

    def join(self, prompt: list[int], lose: int, silent: bool) -> None:
        """A request has the prompt of another one, and begins while a load of that one fails."""
        self.reload(prompt, 2, lose, received=False)
        self.step([])
        more = {"return_routed_experts": False} if silent else {}
        self.add([*prompt, *range(2 * BLOCK)], 3, **more)
        self.schedule([])

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

    def abort(self, index: int) -> None:
        if self.requests:
            req_id = str(index % len(self.requests))
            self.scheduler.finish_requests(req_id, RequestStatus.FINISHED_ABORTED)

    def preempt(self, index: int) -> None:
        """As the scheduler does for want of blocks, or for a request of higher priority."""
        running = self.scheduler.running
        if running:
            request = running.pop(index % len(running))
            self.scheduler._preempt_request(request, 0.0)
            self.scheduler.prev_step_scheduled_req_ids.discard(request.request_id)

    # Steps.

    def schedule(self, draft_is_right: list[bool]) -> None:
        if self.scheduler.has_unfinished_requests():
            self.step(draft_is_right)
        self.make_room()

    def schedule_and_abort(self, draft_is_right: list[bool], index: int) -> None:
        """A client leaves while a step runs."""
        if self.scheduler.has_unfinished_requests():
            self.step(draft_is_right)
            self.abort(index)
        self.schedule(draft_is_right)

    def make_room(self) -> None:
        """Deliver steps until another one may be scheduled."""
        while len(self.steps) >= self.setup.depth:
            self.deliver()

    def begin_pass(self, draft_is_right: list[bool]) -> tuple[SchedulerOutput, BlockIds]:
        """Schedule a step; the blocks of its requests, and of those whose load begins."""
        self.note_failing()
        self.runner.num_steps += 1
        self.runner.draft_is_right = draft_is_right
        if self.setup.drafts and not self.runner.proposes:
            running = self.scheduler.running
            is_right = draft_is_right[: self.setup.drafts]
            drafts = [propose(request.all_token_ids, is_right) for request in running]
            self.scheduler.update_draft_token_ids(
                DraftTokenIds([request.request_id for request in running], drafts)
            )
        scheduled = self.scheduler.schedule()
        began: dict[str, range] = {}
        if self.setup.connector:
            began, self.scheduler.connector.loads = self.scheduler.connector.loads, {}
        ids = {
            req_id: self.scheduler.kv_cache_manager.get_block_ids(req_id)
            for req_id in {*began, *scheduled.num_scheduled_tokens}
        }
        for req_id, positions in began.items():
            within = req_id in scheduled.num_scheduled_tokens
            tokens = list(self.requests[req_id].all_token_ids)
            steps = 0 if within else int(req_id) // 4 % 3
            self.loads[req_id] = Load(tokens, ids[req_id][0], positions, steps)
        return scheduled, ids

    def step(self, draft_is_right: list[bool]) -> None:
        self.make_room()
        scheduled, ids = self.begin_pass(draft_is_right)
        loaded = self.load(scheduled)
        step = self.runner.execute(scheduled, ids)
        step.output.kv_connector_output = loaded
        if self.setup.policy_fail:
            # They share a block that a step in flight did not load.
            self.may_fail |= step.spoiled
        self.steps.append(step)
        in_flight = {step.number for step in self.steps}
        assert self.runner.reads_lost <= in_flight, "a step reads KV that is known not to be there"

    def load(self, scheduled: SchedulerOutput) -> KVConnectorOutput | None:
        """What the KV connector does in the step."""
        if not self.setup.connector:
            return None
        received, lost = set(), set()
        for req_id, load in list(self.loads.items()):
            if load.steps:
                load.steps -= 1
                continue
            del self.loads[req_id]
            self.runner.load(load.tokens, load.blocks, load.positions)
            if req_id not in scheduled.num_scheduled_tokens:
                received.add(req_id)
            if self.lose is not None:
                lost.update(load.lost(self.lose))
                self.lose = None
        for block in lost:
            self.runner.lose(block)
        if self.setup.policy_fail:
            for req_id in self.scheduler.requests:
                (blocks,) = self.scheduler.kv_cache_manager.get_block_ids(req_id)
                if lost & {*blocks}:
                    self.may_fail.add(req_id)
        return KVConnectorOutput(finished_recving=received, invalid_block_ids=lost)

    def fail(self, block: int) -> None:
        """The next load loses a block."""
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
        self.delivering = {*step.scheduled.num_scheduled_tokens}
        step.consume()
        if self.faults:
            self.faults.break_pack(step.output.aux_output_connector_output)
        messages = self.scheduler.update_from_output(step.scheduled, step.output)
        # As they reach the API servers.
        clients = [DECODER.decode(ENCODER.encode(message)) for message in messages.values()]
        for client in clients:
            # In the release they come with each output.
            getattr(client, "distribute_routed_experts", lambda: None)()
        for client in clients:
            self.split_rows(client.outputs)
        for output in (output for client in clients for output in client.outputs):
            req_id = output.request_id
            if output.new_token_ids and req_id in step.spoiled:
                assert self.requests[req_id].num_preemptions, "a token of KV that is not there"
                assert left_out("output of a request that was preempted while a load of it failed")
            if output.finish_reason == FinishReason.ERROR:
                self.failed.add(req_id)
            elif output.routed_experts is not None:
                self.check_rows(step, output)

    def split_rows(self, outputs: list[Any]) -> None:
        """Check that a message has weights only if one of its requests gets them. Check that the
        front end splits its rows into ids and their weights. Leave the ids."""
        with_rows = [o for o in outputs if getattr(o.routed_experts, "pieces", None)]
        wide = any(self.gets_weights(output.request_id) for output in with_rows)
        for output in with_rows if self.setup.wide else ():
            for index, rows in enumerate(output.routed_experts.pieces):
                assert rows.dtype == (np.uint8 if wide else np.uint16)
                if wide:
                    ids, weights = take_ids(rows, RECORD), take_weights(rows, RECORD)
                    np.testing.assert_array_equal(weights, weigh(ids))
                    output.routed_experts.pieces[index] = ids

    def drain(self) -> None:
        for request in self.open_sessions():
            self.scheduler.add_request(self.make_request(request.request_id, [], 1))
        for _ in range(500):
            if not (self.scheduler.has_unfinished_requests() or self.steps or self.loads):
                return
            if self.scheduler.has_unfinished_requests() or self.loads:
                self.step([True] * self.setup.drafts)
                self.make_room()
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

    # Weights.

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
        self.drain()
        self.runner.weights += 1

    def keep(self) -> None:
        """The weights change while requests run, which go on with the KV that they have."""
        self.runner.weights += 1

    def outdate(self, prompt: list[int], kind: int) -> None:
        """The rows of a prompt's blocks stay when its KV has left the GPU. A silent request
        computes the blocks with other weights, and the KV connector keeps these."""
        prompt = [*prompt, *range(2 * BLOCK)]
        self.add(prompt, 1)
        self.drain()
        self.evict()
        self.runner.weights += 1
        self.add(prompt, 1, return_routed_experts=False)
        self.drain()
        self.evict()
        self.add_of_kind(kind, prompt)

    # Faults.

    def break_next(self, places: list[str]) -> None:
        """The next calls of these methods fail."""
        assert self.faults is not None
        self.faults.armed |= Counter(places)

    def note_fault(self) -> None:
        self.fails_until = self.runner.num_steps + self.setup.depth + 2
        # Some may have ended with the step whose rows are lost.
        self.may_fail |= self.delivering & self.asking
        self.note_failing()

    def note_failing(self) -> None:
        """Requests may end with an error that are there while the scheduler does not know yet
        which rows are lost."""
        if self.faults and (self.runner.num_steps <= self.fails_until or self.has_lost()):
            self.may_fail.update(
                req_id for req_id in self.asking if not self.requests[req_id].is_finished()
            )

    def has_lost(self) -> bool:
        """Whether a side has lost all rows, and the scheduler has not ended their requests."""
        worker, scheduler_side = self.runner.connector, self.scheduler.aux_output_connector
        lost = getattr(worker, "_lost_generation", -1) == scheduler_side._generation
        lost = lost or getattr(scheduler_side, "_is_lost", False)
        return lost or getattr(worker._store, "failed", False)

    def crash(self, draft_is_right: list[bool], where: str) -> None:
        """A step fails in the worker: before it begins, when it has begun, or when its rows are
        prepared. The engine recovers, as with fault tolerance of expert parallelism."""
        self.make_room()
        if not self.scheduler.has_unfinished_requests():
            return
        scheduled, ids = self.begin_pass(draft_is_right)
        for req_id in scheduled.num_scheduled_tokens:
            load = self.loads.pop(req_id, None)
            if load and where == "prepared":
                self.runner.load(load.tokens, load.blocks, load.positions)
        if where == "before":
            pass
        elif where == "begun":
            self.runner.connector.begin_step(scheduled.aux_output_connector_metadata)
        else:
            self.runner.execute(scheduled, ids)
        recover(self.scheduler, self.runner.connector, self.steps, self.setup.depth, self.config)
        self.runner.forget()

    # What must hold.

    def check_rows(self, step: Step, output: Any) -> None:
        """The rows of an output are those with which its tokens' KV was computed."""
        req_id = output.request_id
        assert req_id in self.asking
        start = self.ends[req_id]
        if not isinstance(output.routed_experts, np.ndarray):  # one array in the release
            if stated := output.routed_experts.start:
                assert stated <= step.firsts[req_id]
                start = max(start, stated)
            output.routed_experts = np.concatenate(output.routed_experts.pieces)
        self.ends[req_id] = end = start + len(output.routed_experts)
        truth = step.truth[req_id][start:end]
        if (truth == GARBAGE).all((1, 2)).any():
            assert req_id in step.spoiled
            assert self.setup.depth > 1
            assert self.requests[req_id].num_preemptions
            assert left_out("output of a request that was preempted while a load of it failed")
            reject()
        assert_computed_with(output.routed_experts, truth)

    def check(self) -> None:
        """Everybody has all rows that were asked for, and nothing is left of the requests."""
        for req_id, request in self.requests.items():
            assert request.is_finished()
            if req_id not in self.asking or request.status == RequestStatus.FINISHED_ABORTED:
                continue
            if req_id not in self.failed:
                assert self.ends[req_id] == max(request.num_tokens - 1, self.starts[req_id])
        assert self.failed <= self.may_fail, "requests end with an error for no reason"
        if self.faults:
            self.faults.armed.clear()
        self.check_nothing_is_left()
        for request in self.requests.values():
            self.check_stored(request)

    def check_nothing_is_left(self) -> None:
        """Only cached blocks are left of requests that have ended, and stored rows that the
        scheduler counts."""
        if self.has_lost():
            # The scheduler hears of it with the next rows.
            self.add([1], 1)
            self.drain()
        self.step([])  # brings the worker the end of the last requests
        while self.steps:
            self.deliver()
        worker, scheduler_side = self.runner.connector, self.scheduler.aux_output_connector
        for side, names in ((worker, OF_WORKER), (scheduler_side, OF_SCHEDULER)):
            for name in names:
                assert not getattr(side, name, None), name
        assert len(worker._buffer._free_slots) == len(worker._buffer._rows)
        for name in ("requests", "running", "waiting", "kv_holding_waiting", "_inflight_prefills"):
            assert not getattr(self.scheduler, name), name
        pool = self.scheduler.kv_cache_manager.block_pool
        assert pool.get_num_free_blocks() == self.setup.num_blocks - 1
        worker._store._queue.join()
        store = worker._store._store
        kept = [
            key
            for block_hash, keys in scheduler_side._kv_cached.items()
            # The release has several.
            for key in (keys if isinstance(keys, list) else [key_of(block_hash, keys or 0)])
        ]
        keys = routed_experts_keys(kept, str(scheduler_side._generation))
        assert store._references == dict.fromkeys(keys, 1)
        # The release keeps others too.
        assert getattr(store, "_objects", {}).keys() <= store._references.keys()

    def check_stored(self, request: Request) -> None:
        """Every cached block of the request whose rows were captured has its own."""
        store, group = self.runner.connector._store, self.setup.row_group
        pool = self.scheduler.kv_cache_manager.block_pool
        generation = str(self.scheduler.aux_output_connector._generation)
        step = self.setup.row_block // self.scheduler.hash_block_size
        for block_hash in request.block_hashes[step - 1 :: step] if step else ():
            cached = pool.get_cached_block(block_hash, [group])
            if cached is None or not getattr(cached[0], "has_aux_output", True):
                continue
            key = key_of(block_hash, getattr(cached[0], "aux_output_number", 0))
            data = store.get_concatenated(routed_experts_keys([key], generation))
            truth = self.runner.kv.rows[cached[0].block_id, : self.setup.row_block]
            rows = np.frombuffer(data, np.uint8).reshape(*truth.shape[:2], -1)
            if self.setup.wide:
                ids, weights = take_ids(rows, RECORD), take_weights(rows, RECORD)
                np.testing.assert_array_equal(weights, weigh(ids))
            else:
                ids = rows.view(np.uint16)
            assert_computed_with(ids, truth)
