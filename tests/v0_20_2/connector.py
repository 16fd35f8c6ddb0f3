# SPDX-License-Identifier: Apache-2.0
"""A KV connector, both sides of it: what it has, loads and fails to load."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request

from tests.sequence import prefix_digests
from tests.v0_20_2.kv import KVCache


@dataclass
class Load:
    """Blocks of a request that are to be loaded."""

    request: Request
    # Of the request's blocks.
    indices: range
    block_ids: list[int]
    # How many more steps it takes.
    steps: int


@dataclass
class Connector:
    """Has the KV of every other prompt, at once or in the steps after. When it is first asked for
    a prompt, it has few blocks. When the request comes back, it has all that may be loaded."""

    kv: KVCache
    loads: list[Load] = field(default_factory=list)
    asked: set[str] = field(default_factory=set)
    # What was found for the request that is being scheduled.
    found: range = range(0)
    is_async: bool = False
    # Index of the block that the next load fails to bring.
    lose: int | None = None

    # The scheduler's side

    def get_num_new_matched_tokens(self, request: Request, num_computed: int) -> tuple[int, bool]:
        kind = int(request.request_id) % 4
        if kind < 2:
            return 0, False
        size = self.kv.block_size
        # Only a load between steps may bring the whole prompt.
        stop = (request.num_prompt_tokens - (kind == 2)) // size
        if request.request_id not in self.asked:
            stop = min(stop, 1 + len(self.asked) % 3)
            self.asked.add(request.request_id)
        self.found = range(num_computed // size, stop)
        self.is_async = kind == 3 and len(self.found) > 0
        return len(self.found) * size, self.is_async

    def update_state_after_alloc(self, request: Request, blocks: Any, num_external: int) -> None:
        if num_external:
            block_ids = [blocks.get_block_ids()[0][index] for index in self.found]
            # Of two loads between steps, one takes longer.
            steps = int(request.request_id) // 4 % 2 if self.is_async else 0
            self.loads.append(Load(request, self.found, block_ids, steps))

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> None:
        return None

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, None]:
        return False, None

    def update_connector_output(self, output: KVConnectorOutput) -> None:
        pass

    def take_events(self) -> tuple[()]:
        return ()

    # The workers' side

    def load(self, scheduled: SchedulerOutput, weights: int) -> KVConnectorOutput:
        """Fill the blocks of the loads that end in this step."""
        ended = [load for load in self.loads if load.steps == 0]
        self.loads = [load for load in self.loads if load.steps > 0]
        for load in self.loads:
            load.steps -= 1
        size = self.kv.block_size
        lost = set()
        for load in ended:
            digests = prefix_digests(load.request.prompt_token_ids)
            for index, block_id in zip(load.indices, load.block_ids, strict=True):
                place = self.kv.places([block_id], 0, size)
                of_block = digests[index * size : (index + 1) * size]
                self.kv.fill([place], of_block, weights)
            if self.lose is not None:
                lost_id = load.block_ids[self.lose % len(load.block_ids)]
                self.kv.lose(lost_id)
                lost.add(lost_id)
                self.lose = None
        scheduled_ids = scheduled.num_scheduled_tokens
        between = {load.request.request_id for load in ended} - scheduled_ids.keys()
        return KVConnectorOutput(finished_recving=between, invalid_block_ids=lost)
