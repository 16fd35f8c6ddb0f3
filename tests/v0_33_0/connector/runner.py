# SPDX-License-Identifier: Apache-2.0
"""The model runner of v0.33.0's property test: a naive model with a KV cache, and the worker's side
of the connector."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from vllm.config import VllmConfig
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.outputs import ModelRunnerOutput

from harness import scheduling
from tests.sequence import next_token, propose, true_row
from tests.v0_33_0.connector.setups import MAX_LEN, WINDOW_TOKENS, Setup

# Of each request: its blocks in each KV cache group.
BlockIds = dict[str, Sequence[list[int]]]
# The rows of tokens whose KV was received or did not load, and of those computed from the latter.
GARBAGE = np.full((2, 2), 0xFFFF, dtype=np.uint16)
# Number of a computation that is not known.
ANY = 0xFFFF


# What rows with weights are: of each layer two ids, and then two weights.
RECORD = np.dtype([("ids", "uint16", (2,)), ("weights", "float32", (2,))])


def weigh(rows: np.ndarray) -> np.ndarray:
    """Weights that belong to the ids of rows and to nothing else."""
    names = [zlib.crc32(row.tobytes()) for row in rows]
    return np.array(names, np.float32).reshape(-1, 1, 1) * np.array([[1, 2], [3, 4]], np.float32)


def widen(rows: np.ndarray) -> np.ndarray:
    """Rows with their weights, as bytes."""
    return np.concatenate((rows.view(np.uint8), weigh(rows).view(np.uint8)), axis=-1)


def of_any(rows: np.ndarray) -> np.ndarray:
    """The rows, of a computation that is not known."""
    rows = rows.copy()
    rows[:, 1, 1] = ANY
    return rows


def names(tokens: Sequence[int]) -> np.ndarray:
    """A number for each token that names it and all tokens before it, never 0."""
    name, result = 0, []
    for token in tokens:
        name = zlib.crc32(token.to_bytes(4, "little", signed=True), name)
        result.append(name + 1)
    return np.array(result, np.int64)


class KVCache:
    """What each token's KV in each block is."""

    def __init__(self, setup: Setup) -> None:
        # Other groups keep a state, or compute the tokens again that they need.
        self.groups = [
            (group, kind, size)
            for group, (kind, size) in enumerate(setup.groups)
            if kind in ("full", "window")
        ]
        size = max(size for _, size in setup.groups)
        # The rows with which it was computed, and the tokens up to it (`names`; 0: junk).
        self.rows = np.tile(GARBAGE, (setup.num_blocks, size, 1, 1))
        self.owners = np.zeros((setup.num_blocks, size), np.int64)
        # Of KV that is junk because it did not load: number of the step of the load.
        self.lost_in = np.zeros((setup.num_blocks, size), np.int64)

    def places(
        self, ids: Sequence[list[int]], positions: range
    ) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
        """Where each group has the positions: its kind, the blocks and the places in these."""
        for group, kind, size in self.groups:
            indices, places = np.divmod(np.array(positions, np.int64), size)
            yield kind, np.array(ids[group], np.int64)[indices], places

    def write(
        self, ids: Sequence[list[int]], positions: range, rows: np.ndarray, owners: np.ndarray
    ) -> None:
        for _, blocks, places in self.places(ids, positions):
            # A block before a sliding window was freed.
            held = blocks > 0
            self.rows[blocks[held], places[held]] = rows[held]
            self.owners[blocks[held], places[held]] = owners[held]
            self.lost_in[blocks[held], places[held]] = 0

    def spoil(self, ids: Sequence[list[int]], positions: range, step: int) -> None:
        for _, blocks, places in self.places(ids, positions):
            self.rows[blocks, places] = GARBAGE
            self.owners[blocks, places] = 0
            self.lost_in[blocks, places] = step

    def copy(self, source: int, target: int) -> None:
        for array in (self.rows, self.owners, self.lost_in):
            array[target] = array[source]

    def lost_before(self, ids: Sequence[list[int]], owners: np.ndarray, start: int) -> set[int]:
        """The steps with loads that lost what a token at `start` reads. All else that it reads
        must be the KV of the tokens before it."""
        lost = set()
        for kind, blocks, places in self.places(ids, range(start)):
            first = max(start - WINDOW_TOKENS + 1, 0) if kind == "window" else 0
            (wrong,) = (self.owners[blocks, places] != owners[:start]).nonzero()
            for position in wrong[wrong >= first].tolist():
                place = blocks[position], places[position]
                assert place[0], f"the {kind} KV of token {position} was freed"
                assert self.lost_in[place], (
                    f"a token at {start} reads KV of token {position} that nobody computed, in "
                    f"block {place[0]}"
                )
                lost.add(int(self.lost_in[place]))
        return lost


@dataclass
class Step:
    """A step on its way."""

    number: int
    scheduled: SchedulerOutput
    output: ModelRunnerOutput
    pending: Any
    # By request: the rows with which the KV of its positions was computed, this step included.
    truth: dict[str, np.ndarray]
    # By request: the first token that it computed, after what it found or received.
    firsts: dict[str, int]
    # Requests that read KV which did not load.
    spoiled: set[str]

    def consume(self) -> None:
        """What the output thread does when the copy has arrived."""
        if self.pending is not None:
            connector = self.pending.connector
            self.output.aux_output_connector_output = self.pending.process_output()
            self.pending = None
            connector._store._queue.join()


class Runner:
    """Runs steps as the model runner does, with the worker's side of the connector."""

    def __init__(self, setup: Setup, config: VllmConfig, kv_cache: KVCacheConfig) -> None:
        self.setup = setup
        self.weights = 0
        self.num_steps = self.num_computations = 0
        # Whether requests compute the last tokens of cached blocks again.
        self.replays = any(kind == "replay" for kind, _ in setup.groups)
        self.tokens: dict[str, list[int]] = {}
        self.num_prompt_tokens: dict[str, int] = {}
        self.kv = KVCache(setup)
        self.firsts: dict[str, int] = {}
        # Tokens that were computed, less rejected drafts.
        self.num_done: dict[str, int] = {}
        # The worker makes the drafts itself, of which the scheduler knows the number only.
        self.proposes = setup.asynchronous and setup.drafts > 0
        self.draft_is_right: list[bool] = []
        # The latest computation of each block, named by all tokens up to its end: what a KV
        # connector can load.
        self.saved: dict[tuple[int, ...], np.ndarray] = {}
        # By request: its rows, and the blocks that it has had.
        self.truth: dict[str, np.ndarray] = {}
        self.had: dict[str, set[int]] = {}
        # Steps with loads that lost what this step reads.
        self.reads_lost: set[int] = set()
        self.rows = np.empty((0, 2, 2), np.uint16)
        form = ((2, RECORD.itemsize), "uint8") if setup.wide else ((2, 2), "uint16")
        self.connector = scheduling.make_worker_connector(
            config, kv_cache, *form, self.snapshot, setup.depth
        )

    def snapshot(self, count: int, rows: np.ndarray | None = None) -> torch.Tensor:
        chosen = self.rows[:count] if rows is None else self.rows[rows]
        return torch.from_numpy(widen(chosen) if self.setup.wide else chosen)

    def execute(self, scheduled: SchedulerOutput, ids: BlockIds) -> Step:
        """Process the scheduled tokens; sample where the last known one is among them.

        Args:
            scheduled: the step.
            ids: the KV blocks of each request.
        """
        starts, admitted = self._update(scheduled)
        for copy in scheduled.kv_cache_block_copies or ():
            self.kv.copy(copy.src_block_id, copy.dst_block_id)
        self.connector.begin_step(scheduled.aux_output_connector_metadata)
        self.connector._store._queue.join()
        req_ids = list(scheduled.num_scheduled_tokens)
        fed, ranges = {}, {}
        for req_id in req_ids:
            start = min(starts[req_id], self.num_done.get(req_id, starts[req_id]))
            ranges[req_id] = range(start, start + scheduled.num_scheduled_tokens[req_id])
            drafts = scheduled.scheduled_spec_decode_tokens.get(req_id, [])
            fresh = any(new.req_id == req_id for new in scheduled.scheduled_new_reqs)
            if self.proposes and not fresh:  # theirs are padding
                drafts = propose(self.tokens[req_id], self.draft_is_right[: len(drafts)])
            fed[req_id] = [*self.tokens[req_id], *drafts]
        rows = self._compute(fed, ranges, ids, admitted)
        sampled, rejected = [], []
        for req_id in req_ids:
            tokens = self._sample(req_id, fed[req_id], ranges[req_id])
            done = min(ranges[req_id].stop, len(self.tokens[req_id]) - 1)
            self.num_done[req_id] = done
            sampled.append(tokens)
            rejected.append(ranges[req_id].stop - done)
            start = ranges[req_id].start
            self._note(req_id, ids[req_id][self.setup.row_group], req_id in admitted)
            self.truth[req_id][start:done] = rows[req_id][: max(done - start, 0)]
            self._save(req_id, start)
        pending = self._prepare(req_ids, ranges, rows)
        if pending is not None:
            pending.enqueue_cpu_copy(np.array([len(t) for t in sampled]), np.array(rejected))
        output = ModelRunnerOutput(
            req_ids=req_ids,
            req_id_to_index={req_id: i for i, req_id in enumerate(req_ids)},
            sampled_token_ids=sampled,
        )
        truth = {r: self.truth[r][: self.num_done[r]].copy() for r in req_ids}
        number, firsts = self.num_steps, dict(self.firsts)
        return Step(number, scheduled, output, pending, truth, firsts, self.spoiled)

    def _compute(
        self, fed: dict[str, list[int]], ranges: dict[str, range], ids: BlockIds, admitted: set[str]
    ) -> dict[str, np.ndarray]:
        """Write the KV of the step, and check what it reads. A layer writes the KV of all tokens
        before any token reads it."""
        rows, owners = {}, {}
        for req_id, positions in ranges.items():
            rows[req_id] = np.stack([true_row(fed[req_id], p, self.weights) for p in positions])
            # Each computation has rows of its own, as if rounding decided between experts.
            rows[req_id][:, 1, 0] += rows[req_id][:, 1, 1] << 6
            self.num_computations += 1
            rows[req_id][:, 1, 1] = self.num_computations
            owners[req_id] = names(fed[req_id])
            # Drafts of a request that goes on elsewhere are no tokens after the known ones.
            its_owners = np.resize(owners[req_id][positions.start : positions.stop], len(positions))
            blocks = ids[req_id][self.setup.row_group]
            rewritten = self._rewritten(req_id, blocks, positions, its_owners)
            self.kv.write(ids[req_id], positions, rows[req_id], its_owners)
            for place in rewritten if self.replays or req_id not in admitted else ():
                self.kv.rows[place][1, 1] = ANY
        self.reads_lost.clear()
        self.spoiled: set[str] = set()
        while True:
            lost = {
                req_id: self.kv.lost_before(ids[req_id], owners[req_id], positions.start)
                for req_id, positions in ranges.items()
                if req_id not in self.spoiled
            }
            now = [req_id for req_id, steps in lost.items() if steps]
            if not now:
                return rows
            for req_id in now:
                self.reads_lost |= lost[req_id]
                self.kv.spoil(ids[req_id], ranges[req_id], max(lost[req_id]))
                rows[req_id][:] = GARBAGE
                self.spoiled.add(req_id)

    def _rewritten(
        self, req_id: str, blocks: list[int], positions: range, owners: np.ndarray
    ) -> list[tuple[int, int]]:
        """Where the request writes KV of a block that it has, and that has this KV already. Others
        that share the block may have the rows of either computation."""
        size, had = self.setup.row_block, self.had.get(req_id, ())
        places = [(blocks[p // size], p % size) for p in positions]
        return [
            place
            for p, place, owner in zip(positions, places, owners, strict=True)
            if (self.replays or p // size in had) and self.kv.owners[place] == owner
        ]

    def _sample(self, req_id: str, fed: list[int], positions: range) -> list[int]:
        known = self.tokens[req_id]
        tokens: list[int] = []
        if positions.stop >= len(known):
            tokens.append(next_token(known))
            for draft in fed[len(known) :]:
                if draft != tokens[-1]:
                    break
                tokens.append(next_token([*known, *tokens]))
            known += tokens
        return tokens

    def _note(self, req_id: str, blocks: list[int], admitted: bool) -> None:
        """Note the rows of the blocks that the request got."""
        size, num_done = self.setup.row_block, self.num_done[req_id]
        if admitted or req_id not in self.truth:
            self.had[req_id] = set()
            self.truth[req_id] = np.tile(GARBAGE, (MAX_LEN + size, 1, 1))
        truth = self.truth[req_id]
        for index in range(-(-num_done // size)):
            block = blocks[index]
            if index in self.had[req_id]:
                # Others may compute a block again that they share with the request.
                continue
            if block:
                truth[index * size : (index + 1) * size] = self.kv.rows[block, :size]
            else:
                # A block before a sliding window: its rows are known by its tokens alone.
                name = tuple(self.tokens[req_id][: (index + 1) * size])
                truth[index * size : (index + 1) * size] = of_any(self.saved[name])
            self.had[req_id].add(index)

    def _save(self, req_id: str, start: int) -> None:
        """Keep the blocks that the step filled."""
        size = self.setup.row_block
        for index in range(start // size, self.num_done[req_id] // size):
            block = self.truth[req_id][index * size : (index + 1) * size]
            if not (block == GARBAGE).all((1, 2)).any():
                self.saved[tuple(self.tokens[req_id][: (index + 1) * size])] = block.copy()

    def _prepare(
        self, req_ids: list[str], ranges: dict[str, range], rows: dict[str, np.ndarray]
    ) -> Any:
        if not req_ids:
            return None
        self.rows = np.concatenate([rows[req_id] for req_id in req_ids])
        return self.connector.prepare_output(
            SimpleNamespace(
                req_ids=req_ids,
                query_start_loc_np=np.cumsum([0, *(len(ranges[r]) for r in req_ids)]),
                num_computed_tokens_np=np.array([ranges[r].start for r in req_ids]),
            )
        )

    def load(self, tokens: list[int], blocks: list[int], positions: range) -> None:
        """Load KV. Rows of blocks that another engine computed are unknown."""
        size = self.setup.row_block
        owners = names(tokens)[positions.start : positions.stop]
        self.kv.write([blocks], positions, np.tile(GARBAGE, (len(positions), 1, 1)), owners)
        for index in range(positions.start // size, positions.stop // size):
            if (saved := self.saved.get(tuple(tokens[: (index + 1) * size]))) is not None:
                self.kv.rows[blocks[index]] = of_any(saved)

    def lose(self, block: int) -> None:
        self.kv.rows[block], self.kv.owners[block] = GARBAGE, 0
        self.kv.lost_in[block] = self.num_steps

    def forget(self) -> None:
        """Forget all requests, as `WorkerSentinel` tells the model runner."""
        self.num_done.clear()

    def _update(self, scheduled: SchedulerOutput) -> tuple[dict[str, int], set[str]]:
        """Take over what the scheduler says of requests; the first position of each, and those
        that looked up the prefix cache."""
        for req_id in {*scheduled.finished_req_ids, *(scheduled.preempted_req_ids or ())}:
            self.num_done.pop(req_id, None)
        admitted = scheduled.num_scheduled_tokens.keys() - self.num_done.keys()
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
        return starts, admitted
