# SPDX-License-Identifier: Apache-2.0
"""The engine of the property test: the real scheduler and front end, the naive worker, and what
may happen to them. A test calls the methods in any order, then `drain()` and `check()`."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import numpy as np
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.engine.output_processor import OutputProcessor
from vllm.v1.outputs import DraftTokenIds
from vllm.v1.request import Request, RequestStatus
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from harness.scheduling import make_request
from tests.sequence import VOCABULARY, propose
from tests.v0_20_2 import oracle
from tests.v0_20_2.faults import IN_SCHEDULE, LEAVING, break_rows, break_scheduler
from tests.v0_20_2.model import MOE_LAYERS, Step
from tests.v0_20_2.setups import BLOCK, MAX_LEN, Setup, make_engine_parts

# The id of the first session.
FIRST_SESSION = 1000
STOP_TOKENS = [*range(0, VOCABULARY, 7)]


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
    front_ends: tuple[FrontEnd, ...] = field(default_factory=lambda: (FrontEnd(), FrontEnd()))
    requests: dict[str, Request] = field(default_factory=dict)
    sessions: dict[str, Request] = field(default_factory=dict)
    # The most tokens that each session can have.
    lengths: dict[str, int] = field(default_factory=dict)
    handed: dict[str, list[np.ndarray]] = field(default_factory=dict)
    on_the_way: deque[Step] = field(default_factory=deque)
    # Position of the first row that each client was handed.
    starts: dict[str, int] = field(default_factory=dict)
    # Requests that a fault may have ended.
    may_fail: set[str] = field(default_factory=set)
    # What breaks in the next step whose requests ask: a name of `faults.py`, and which request.
    fault: tuple[str, int] | None = None
    # Whether the scheduler was broken since the last pass began.
    was_broken: bool = False

    def __post_init__(self) -> None:
        self.scheduler, self.worker = make_engine_parts(self.setup)
        self.connector = self.scheduler.connector
        self.scheduler.routed_experts.rows.reserve(2, 2, "uint16")

    # Requests

    def add(
        self,
        prompt: list[int],
        max_tokens: int,
        asks: bool = True,
        start: int = 0,
        salt: str | None = None,
        remote: bool = False,
        stops: bool = False,
        computes_all: bool = False,
    ) -> None:
        sampling = SamplingParams(
            max_tokens=max_tokens,
            ignore_eos=True,
            detokenize=False,
            stop_token_ids=STOP_TOKENS if stops else None,
            # Every other client reads a stream.
            output_kind=RequestOutputKind.FINAL_ONLY
            if len(self.requests) // 2 % 2
            else RequestOutputKind.DELTA,
            # As the input processor leaves them.
            return_routed_experts=True if asks else None,
            routed_experts_prompt_start=min(start, len(prompt)) if asks else None,
            extra_args={"kv_transfer_params": {"do_remote_prefill": remote}},
            # As of a request that returns log-probs of its prompt.
            skip_reading_prefix_cache=computes_all,
        )
        request = self._make_request(str(len(self.requests)), prompt, sampling, salt)
        self.requests[request.request_id] = request
        self.handed[request.request_id] = []
        self.scheduler.add_request(request)
        self.front_ends[request.client_index].add(request)

    def _make_request(
        self,
        req_id: str,
        prompt: list[int],
        sampling: SamplingParams,
        salt: str | None = None,
        resumable: bool = False,
    ) -> Request:
        return Request(
            request_id=req_id,
            prompt_token_ids=prompt,
            sampling_params=sampling,
            pooling_params=None,
            # There are two API servers.
            client_index=int(req_id) % 2,
            cache_salt=salt,
            # Later requests come first as often as not.
            priority=-int(req_id) % 3,
            block_hasher=get_request_block_hasher(BLOCK, sha256),
            resumable=resumable,
        )

    def add_group(self, prompt: list[int], max_tokens: int, size: int) -> None:
        for _ in range(size * self.setup.crowd):
            self.add(list(prompt), max_tokens)

    def add_relay(
        self,
        prompt: list[int],
        num_cached: int,
        start: int,
        lose: int | None,
        leaves: str | None = None,
    ) -> None:
        """A silent request caches a prefix. Another one receives it nevertheless, because the rows
        are missing, and computes the blocks after it. A third request uses these blocks. The second
        one may leave while its load is on its way."""
        prompt = [*prompt, *range(3 * BLOCK)]
        if leaves is not None:
            # So that the connector has something for the receiver, in the same step.
            while len(self.requests) % 4 != 1:
                self.add([0], 1, asks=False)
        self.add(prompt[: num_cached * BLOCK + 1], 5, asks=False)
        self.schedule([True] * self.setup.drafts)
        if lose is not None:
            self.lose(lose)
        self.add(prompt, 3, remote=True)
        receiver = [*self.requests.values()][-1]
        self.add([*prompt, 1], 3, start=start * BLOCK)
        if leaves is None:
            return
        self.schedule([True] * self.setup.drafts)
        if receiver in self.scheduler.running:
            (self._abort if leaves == "aborted" else self._preempt)(receiver)

    def add_turn(self, index: int, tail: list[int], max_tokens: int) -> None:
        """Continue what a request has so far."""
        if self.requests:
            request = self.requests[str(index % len(self.requests))]
            prompt = [*request.all_token_ids, *tail]
            if len(prompt) + max_tokens < MAX_LEN:
                self.add(prompt, max_tokens)

    def abort(self, index: int) -> None:
        """The client of an unfinished request disconnects."""
        if unfinished := [r for r in self.requests.values() if not r.is_finished()]:
            self._abort(unfinished[index % len(unfinished)])

    def _abort(self, request: Request) -> None:
        with self._break_leaving("free"):
            self.scheduler.finish_requests(request.request_id, RequestStatus.FINISHED_ABORTED)

    def preempt(self, index: int) -> None:
        """As the scheduler does for want of blocks, or for a request of higher priority."""
        if running := self.scheduler.running:
            self._preempt(running[index % len(running)])

    def _preempt(self, request: Request) -> None:
        self.scheduler.running.remove(request)
        with self._break_leaving("release"):
            self.scheduler._preempt_request(request, 0.0)
        self.scheduler.prev_step_scheduled_req_ids.discard(request.request_id)

    # Sessions

    def add_session(self, prompt: list[int], max_tokens: int) -> None:
        """A silent request whose client sends more input later."""
        if len(self.sessions) == self.setup.sessions:
            return
        request = self._make_input(str(FIRST_SESSION + len(self.sessions)), prompt, max_tokens)
        self.sessions[request.request_id] = request
        self.lengths[request.request_id] = len(prompt) + max_tokens
        self.scheduler.add_request(request)

    def extend_session(self, index: int, tail: list[int], max_tokens: int) -> None:
        """The next input, whether the part before has ended or not."""
        if live := [r for r in self.sessions.values() if not r.is_finished()]:
            req_id = live[index % len(live)].request_id
            self.lengths[req_id] += len(tail) + max_tokens
            if self.lengths[req_id] < MAX_LEN:
                self.scheduler.add_request(self._make_input(req_id, tail, max_tokens))

    def _make_input(
        self, req_id: str, tokens: list[int], max_tokens: int, is_last: bool = False
    ) -> Request:
        sampling = SamplingParams(max_tokens=max_tokens, stop_token_ids=STOP_TOKENS)
        sampling.detokenize = False
        tokens = [token + VOCABULARY for token in tokens]
        return self._make_request(req_id, tokens, sampling, resumable=not is_last)

    # Weights

    def reset(self, running: bool) -> None:
        """Drop all KV, then change the weights."""
        if running and any(map(self._waits_with_blocks, self.scheduler.requests.values())):
            # The release refuses it with an error.
            return
        if self.scheduler.reset_prefix_cache(reset_running_requests=running):
            self.worker.kv.first_valid = len(self.worker.kv.digests)
            self.worker.weights += 1

    def _waits_with_blocks(self, request: Request) -> bool:
        """Its KV is loading, or it is a session between two inputs."""
        block_ids = self.scheduler.kv_cache_manager.get_block_ids(request.request_id)
        return request not in self.scheduler.running and any(block_ids)

    def change_weights(self) -> None:
        """As `pause` with mode keep and without a reset: requests go on with the KV that is there,
        and so do later ones that find it in the prefix cache."""
        self.worker.weights += 1

    # Faults

    def lose(self, block: int) -> None:
        """The next load fails to bring a block."""
        if self.setup.connector:
            self.connector.lose = block

    def break_step(self, fault: str, index: int) -> None:
        self.fault = (fault, index)

    def _break_leaving(self, fault: str) -> AbstractContextManager[None]:
        """While a request leaves, if this was asked for."""
        if self.fault is None or self.fault[0] != fault:
            return nullcontext()
        self.fault = None
        self._note_that_all_may_fail()
        return break_scheduler(self.scheduler, fault)

    def break_failed_load(self, prompt: list[int], index: int, aborts: bool) -> None:
        """A load fails, and a request leaves before this is known. Then the scheduler breaks."""
        self.lose(0)
        self.add([*prompt, *range(BLOCK)], 4, remote=True)
        self.break_step("discard_steps_in_flight", 0)
        self.schedule([True] * self.setup.drafts)
        (self.abort if aborts else self.preempt)(index)

    # Steps

    def schedule(self, draft_is_right: Sequence[bool]) -> None:
        if not self.scheduler.has_unfinished_requests():
            return
        self.start_step(draft_is_right)
        while len(self.on_the_way) >= self.setup.depth:
            self.deliver()

    def start_step(self, draft_is_right: Sequence[bool] = ()) -> None:
        """Schedule a step and run it. Its output is on its way then."""
        self.worker.draft_is_right = draft_is_right
        if self.setup.drafts and not self.worker.proposes:
            self._propose(draft_is_right)
        scheduled = self._schedule()
        self.worker.update(scheduled)
        loaded = None
        if self.setup.connector:
            loaded = self.connector.load(scheduled, self.worker.weights)
        step = self.worker.execute(scheduled)
        step.output.kv_connector_output = loaded
        self.on_the_way.append(step)

    def _schedule(self) -> SchedulerOutput:
        """A pass, which breaks as was asked for."""
        if self.was_broken:
            # Requests that begin in the next pass may end too.
            self._note_that_all_may_fail()
            self.was_broken = False
        if self.fault is None or self.fault[0] not in IN_SCHEDULE:
            return self.scheduler.schedule()
        (fault, _), self.fault = self.fault, None
        self._note_that_all_may_fail()
        with break_scheduler(self.scheduler, fault):
            return self.scheduler.schedule()

    def _note_that_all_may_fail(self) -> None:
        """All unfinished requests that get rows."""
        self.was_broken = True
        unfinished = [r for r in self.requests.values() if not r.is_finished()]
        self.may_fail |= {r.request_id for r in unfinished if oracle.asks(r)}

    def _propose(self, draft_is_right: Sequence[bool]) -> None:
        running = self.scheduler.running
        is_right = draft_is_right[: self.setup.drafts]
        drafts = [propose(request.all_token_ids, is_right) for request in running]
        self.scheduler.update_draft_token_ids(
            DraftTokenIds([request.request_id for request in running], drafts)
        )

    def deliver(self) -> None:
        """The scheduler processes the output of the oldest step on its way."""
        if not self.on_the_way:
            return
        step = self.on_the_way.popleft()
        outputs = self._update(step)
        if step.output.routed_experts is not None:
            # The next step reuses its buffer: whoever kept a view of it is wrong now.
            step.output.routed_experts.rows[:] = 0
        for index, client in outputs.items():
            self.front_ends[index].receive(client)
            if client.routed_experts is not None:
                assert client.routed_experts.moe_layers == MOE_LAYERS
                self._take_rows(client, step)

    def _update(self, step: Step) -> dict[int, EngineCoreOutputs]:
        """Let the scheduler process the step, which breaks as was asked for."""
        name = None if self.fault is None else self.fault[0]
        loaded = step.output.kv_connector_output
        if name == "discard_steps_in_flight":
            breaks = loaded is not None and bool(loaded.invalid_block_ids)
        else:
            elsewhere = name is None or name in (*IN_SCHEDULE, *LEAVING)
            breaks = not elsewhere and step.output.routed_experts is not None
        if self.fault is None or not breaks:
            return self._update_unbroken(step)
        fault, self.fault = self.fault, None
        self._note_that_all_may_fail()
        with break_rows(step.output, self.scheduler, *fault):
            return self._update_unbroken(step)

    def _update_unbroken(self, step: Step) -> dict[int, EngineCoreOutputs]:
        outputs = self.scheduler.update_from_output(step.scheduled, step.output)
        loaded = step.output.kv_connector_output
        if self.setup.loads_end and loaded is not None and loaded.invalid_block_ids:
            self.may_fail |= {r.request_id for r in self.requests.values() if is_error(r)}
        return outputs

    def _take_rows(self, client: EngineCoreOutputs, step: Step) -> None:
        """A client is handed the rows of a message."""
        packed = client.routed_experts
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
            tokens = self.requests[req_id].all_token_ids
            oracle.check_rows(rows, start, tokens, step.passes[req_id], self.worker.kv)
            chunks.append(rows)

    # The end

    def drain(self) -> None:
        for session in self.sessions.values():
            if not session.is_finished():
                self.scheduler.add_request(self._make_input(session.request_id, [], 1, True))
        for _ in range(2000):
            loading = self.setup.connector and self.connector.loads
            if self.scheduler.has_unfinished_requests() or loading:
                self.start_step([True] * self.setup.drafts)
            elif not self.on_the_way:
                return
            self.deliver()
        raise AssertionError("the scheduler does not finish its requests")

    def check(self) -> None:
        """Every request has the rows of its tokens, all of them if nothing ended it. Nothing is
        left of any request, but KV and rows in the prefix cache."""
        if self.scheduler.routed_experts.error is not None:
            # A hook failed after the last step. The next step forgets what it left.
            self.add([1], 1, asks=False)
            self.drain()
        for req_id, request in self.requests.items():
            assert not is_error(request) or req_id in self.may_fail
            rows = np.concatenate([np.empty((0, 2, 2), np.uint16), *self.handed[req_id]])
            oracle.check_request(request, rows, self.starts.get(req_id), req_id in self.may_fail)
            front_end = self.front_ends[request.client_index]
            if req_id in front_end.finished:
                received = np.concatenate([rows[:0], *front_end.rows[req_id]])
                np.testing.assert_array_equal(received, rows)
        for session in self.sessions.values():
            oracle.check_tokens(session)
        requests = [*self.requests.values(), *self.sessions.values()]
        oracle.check_cached_blocks(requests, self.scheduler, self.worker.kv)
        oracle.check_nothing_left(self.scheduler)


def is_error(request: Request) -> bool:
    return request.status == RequestStatus.FINISHED_ERROR
