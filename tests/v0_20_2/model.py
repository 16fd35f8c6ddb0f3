# SPDX-License-Identifier: Apache-2.0
"""A naive model of what the workers do, for the real scheduler to be driven with.

Its KV cache (`kv.py`) knows what is in each place. So the model notices when it reads the KV of
other tokens, of a failed load, of a step that did not run, or from before a reset.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput
from vllm.v1.outputs import ModelRunnerOutput, RoutedExpertsLists
from vllm.v1.routed_experts_params import get_routed_experts_start

from tests.sequence import next_token, prefix_digests, propose
from tests.v0_20_2.kv import UNSEEN, KVCache, make_rows

MOE_LAYERS = (0, 1)
# Sampled where the model read KV that is not of the request's tokens. Nobody may get it.
POISON = 1000


@dataclass
class Running:
    """A request as a model runner keeps it."""

    tokens: list[int]
    num_prompt_tokens: int
    asks: bool
    # By KV cache group.
    block_ids: list[list[int]]
    # The pass of each position that the request computed or read since it began or was resumed.
    # UNSEEN where it did neither.
    passes: np.ndarray
    # Of the first token that the step processes.
    position: int = 0
    # How many tokens were processed, less rejected drafts.
    num_done: int = 0


@dataclass
class Part:
    """What a step does for one request."""

    req_id: str
    request: Running
    # Position of the first token.
    first: int
    drafts: Sequence[int]
    # Of the tokens up to the last one.
    digests: list[int]
    passes: np.ndarray
    # Whether it read nothing but KV of the tokens before it.
    is_good: bool = True


@dataclass
class Step:
    """A step that ran, and whose output is on its way to the scheduler."""

    scheduled: SchedulerOutput
    output: ModelRunnerOutput
    # By request that asks: the pass of each position, as the request saw it in this step.
    passes: dict[str, np.ndarray]


@dataclass
class Worker:
    """Keeps the tokens and blocks of every request, as a model runner does, and runs steps."""

    kv: KVCache
    max_len: int
    # By KV cache group: how many tokens before its own each token reads.
    reaches: Sequence[int]
    # The worker makes the drafts itself, of which the scheduler knows the number only.
    proposes: bool = False
    draft_is_right: Sequence[bool] = ()
    weights: int = 0
    requests: dict[str, Running] = field(default_factory=dict)

    def update(self, scheduled: SchedulerOutput) -> None:
        """Note what the scheduler says about requests."""
        for new in scheduled.scheduled_new_reqs:
            self._begin(new)
        cached = scheduled.scheduled_cached_reqs
        for index, req_id in enumerate(cached.req_ids):
            self._go_on(self.requests[req_id], cached, index)

    def _begin(self, new: NewRequestData) -> None:
        assert new.prompt_token_ids is not None
        self.requests[new.req_id] = Running(
            tokens=list(new.prompt_token_ids),
            num_prompt_tokens=len(new.prompt_token_ids),
            asks=get_routed_experts_start(new.sampling_params) is not None,
            block_ids=[list(ids) for ids in new.block_ids],
            passes=np.full(self.max_len, UNSEEN),
            position=new.num_computed_tokens,
        )

    def _go_on(self, request: Running, cached: CachedRequestData, index: int) -> None:
        req_id, position = cached.req_ids[index], cached.num_computed_tokens[index]
        # The scheduler threw away what was sampled from KV that was not loaded.
        del request.tokens[request.num_prompt_tokens + cached.num_output_tokens[index] :]
        new_block_ids = cached.new_block_ids[index]
        if req_id in cached.resumed_req_ids:
            assert new_block_ids is not None
            request.tokens = list(cached.all_token_ids[req_id])
            request.block_ids = [list(ids) for ids in new_block_ids]
            request.passes[:] = UNSEEN
        else:
            for blocks, new in zip(request.block_ids, new_block_ids or (), strict=False):
                blocks += new
            if self.proposes:
                # The scheduler counts drafts of a step on its way as accepted.
                position = min(position, request.num_done)
        request.position = position

    def execute(self, scheduled: SchedulerOutput) -> Step:
        """Process the scheduled tokens; sample where the last known one is among them."""
        parts = [self._write(req_id, scheduled) for req_id in scheduled.num_scheduled_tokens]
        # Each layer writes the KV of all requests before any of them reads.
        while sum(map(self._reads_wrong_kv, parts)) > 0:
            pass
        sampled = [self._sample(part) for part in parts]
        asking = [part for part in parts if part.request.asks]
        routed_experts = None
        if asking:
            routed_experts = RoutedExpertsLists(
                req_ids=[part.req_id for part in asking],
                num_rows=np.array([len(part.passes) for part in asking]),
                positions=np.array([part.first for part in asking]),
                rows=np.concatenate([make_rows(part.passes, part.first) for part in asking]),
                moe_layers=MOE_LAYERS,
            )
        output = ModelRunnerOutput(
            req_ids=[part.req_id for part in parts],
            req_id_to_index={part.req_id: i for i, part in enumerate(parts)},
            sampled_token_ids=sampled,
            routed_experts=routed_experts,
        )
        passes = {part.req_id: self._note_passes(part) for part in asking}
        return Step(scheduled, output, passes)

    def _write(self, req_id: str, scheduled: SchedulerOutput) -> Part:
        """Write the KV of the request's tokens, with all its KV cache groups."""
        request = self.requests[req_id]
        drafts = scheduled.scheduled_spec_decode_tokens.get(req_id, [])
        if self.proposes:
            drafts = propose(request.tokens, self.draft_is_right[: len(drafts)])
        first = request.position
        stop = first + scheduled.num_scheduled_tokens[req_id]
        digests = prefix_digests([*request.tokens, *drafts][:stop])
        places = [self.kv.places(ids, first, stop) for ids in request.block_ids]
        passes = self.kv.fill(places, digests[first:], self.weights)
        return Part(req_id, request, first, drafts, digests, passes)

    def _reads_wrong_kv(self, part: Part) -> bool:
        """Whether the part turns out to read KV that is not of the tokens before it."""
        if not part.is_good:
            return False
        for reach, block_ids in zip(self.reaches, part.request.block_ids, strict=True):
            begin = max(0, part.first - reach)
            places = self.kv.places(block_ids, begin, part.first)
            part.is_good &= self.kv.is_of(places, part.digests[begin : part.first])
        if not part.is_good:
            self.kv.mark_bad(part.passes)
        return not part.is_good

    def _note_passes(self, part: Part) -> np.ndarray:
        """The pass of each position: the newest one of the request's own, else the one whose KV it
        read first."""
        request, size = part.request, self.kv.block_size
        # Blocks that the tokens read from, from their first place on.
        begin = max(0, part.first - self.reaches[0]) // size * size
        places = self.kv.places(request.block_ids[0], begin, part.first)
        read = request.passes[begin : part.first]
        np.copyto(read, self.kv.passes[places], where=read == UNSEEN)
        request.passes[part.first : part.first + len(part.passes)] = part.passes
        return request.passes.copy()

    def _sample(self, part: Part) -> list[int]:
        request, known = part.request, part.request.tokens
        stop = part.first + len(part.passes)
        output: list[int] = []
        if stop >= len(known):
            output.append(next_token(known) if part.is_good else POISON)
            for draft in part.drafts:
                if draft != output[-1]:
                    break
                output.append(next_token([*known, *output]))
            known += output
        request.num_done = min(stop, len(known) - 1)
        return output
