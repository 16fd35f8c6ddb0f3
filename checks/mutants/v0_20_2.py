# SPDX-License-Identifier: Apache-2.0
"""Mutants of the line v0.20.2, whose property test is `tests/v0_20_2/test_scheduling.py`."""

from __future__ import annotations

from checks.mutants import Mutant

MANAGER = "v1/core/routed_experts.py"
CACHE = "v1/core/routed_experts_prefix_cache.py"
KV_TRANSFER = "v1/core/routed_experts_kv_transfer.py"
ROWS = "v1/core/routed_experts_rows.py"
SCHEDULER = "v1/core/sched/scheduler.py"

MUTANTS = [
    Mutant(
        "finality off by one",
        MANAGER,
        "        final = rows.request.num_tokens - 1\n",
        "        final = rows.request.num_tokens\n",
    ),
    Mutant(
        "handed out rows sent again",
        MANAGER,
        "            rows.start = end\n",
        "",
    ),
    Mutant(
        "rows sent again after a preemption",
        MANAGER,
        "            start = max(start, request.num_tokens - 1)\n",
        "            pass\n",
    ),
    Mutant(
        "rows of received tokens sent",
        MANAGER,
        "        return max(start, min(num_received, num_computed))\n",
        "        return start\n",
    ),
    Mutant(
        "request looked up when its step is processed",
        MANAGER,
        "                self.requests.copy(),\n",
        "                self.requests,\n",
    ),
    Mutant(
        "blocks kept after a preemption",
        SCHEDULER,
        "            self.routed_experts.release(request.request_id)\n",
        "            pass\n",
        setups="loads and end",
    ),
    Mutant(
        "new blocks of a request not noted",
        MANAGER,
        "                rows.block_ids += block_ids[self.group_id]\n",
        "                pass\n",
    ),
    Mutant(
        "rows lost when their block leaves the window",
        MANAGER,
        "            if self.frees_early:\n",
        "            if False:\n",
        setups="window",
    ),
    Mutant(
        "client without rows treated like others",
        MANAGER,
        "        if not requests:\n            return\n",
        "",
    ),
    Mutant(
        "rows of others kept in the step",
        ROWS,
        "            rows = rows[is_kept.repeat(counts)]\n",
        "            rows = rows[: np.compress(is_kept, counts).sum()]\n",
    ),
    Mutant(
        "cap removed",
        CACHE,
        "        return max(start, (start // size + int(unusable[0])) * size)\n",
        "        return num_cached_tokens\n",
    ),
    Mutant(
        "block without rows given out first",
        CACHE,
        "            while first is not None and rows.cached_step[first.block_id] == NEVER:\n",
        "            while False:\n",
    ),
    Mutant(
        "rows of received blocks expected",
        CACHE,
        "key is None or index * rows.block_size < num_received",
        "key is None",
    ),
    Mutant(
        "marks survive a reset",
        CACHE,
        "        self._rows.cached_step[:] = NEVER\n",
        "        pass\n",
    ),
    Mutant(
        "marks survive an eviction",
        CACHE,
        "            self._rows.cached_step[block.block_id] = NEVER\n",
        "            pass\n",
    ),
    Mutant(
        "external KV taken unasked",
        KV_TRANSFER,
        "        return asks or not self._manager.returns_rows(request)\n",
        "        return True\n",
    ),
    Mutant(
        "steps in flight count after a failed load",
        KV_TRANSFER,
        "            manager.discard_steps_in_flight(rows)\n",
        "",
    ),
    Mutant(
        "only the first block of a request noted",
        MANAGER,
        "            prefix + block_ids[self.group_id][len(prefix) :],\n",
        "            prefix + block_ids[self.group_id][len(prefix) :][:1],\n",
    ),
    Mutant(
        "rows before the sliding window not copied",
        MANAGER,
        "            self.rows.hold(rows, len(prefix) * size)\n",
        "            pass\n",
        setups="window",
    ),
    Mutant(
        "rows before the sliding window used while they are on their way",
        CACHE,
        " if steps else manager.step + 1\n",
        " if steps else NEVER\n",
        setups="window",
    ),
    Mutant(
        "rows before the sliding window used before earlier steps are processed",
        CACHE,
        "        next_step = steps[0].number if steps else",
        "        next_step =",
        setups="window",
    ),
    Mutant(
        "blocks that a pass found before the sliding window kept for the next pass",
        MANAGER,
        "        self.prefixes.clear()\n",
        "",
        setups="window",
    ),
    Mutant(
        "rows of a shared block that were lost count as there",
        MANAGER,
        "            and other.forget_lost(rows, self.rows.block_size)\n",
        "            and False\n",
    ),
    Mutant(
        "block whose rows were lost used",
        ROWS,
        "        self.cached_step[request.block_ids[request.end // self.block_size :]] = NEVER\n",
        "        pass\n",
    ),
    Mutant(
        "block that a request computes again stays in the prefix cache",
        SCHEDULER,
        "        if sync_blocks_to_evict:\n",
        "        if False:\n",
        setups="failed and loads",
        examples=(400, 1500),
    ),
    Mutant(
        "rows of a block that is computed again replace those of the first block",
        SCHEDULER,
        "            self.routed_experts.on_step_scheduled(scheduler_output, self.requests)\n",
        "            self.routed_experts.on_step_scheduled(scheduler_output, self.requests)\n"
        "            pool = self.kv_cache_manager.block_pool\n"
        "            for rows in self.routed_experts.requests.values():\n"
        "                for i, block_id in enumerate(rows.block_ids):\n"
        "                    if key := pool.blocks[block_id].block_hash:\n"
        "                        first = pool.cached_block_hash_to_block.get_one_block(key)\n"
        "                        rows.block_ids[i] = first.block_id\n",
    ),
    Mutant(
        "requests that share blocks that failed to load both compute them",
        KV_TRANSFER,
        "                sharing.append(request)\n",
        "                pass\n",
        setups="(connector or loads) and not end and not cache",
    ),
    Mutant(
        "first rows of a shared block left out",
        ROWS,
        "        np.minimum.at(part_begins, parts, begins)\n",
        "        part_begins[:] = begins[chosen]\n",
    ),
    Mutant(
        "slice goes on in another array",
        ROWS,
        "        follows &= ~np.isin(offsets[1:], cuts)\n",
        "",
    ),
    Mutant(
        "steps before a resumption count",
        SCHEDULER,
        "if scheduler_output.step < request.first_valid_step:",
        "if False:",
    ),
    Mutant(
        "finished request not freed",
        SCHEDULER,
        "            self.routed_experts.free(request)\n",
        "            pass\n",
    ),
    Mutant(
        "blocks behind a failed load used",
        SCHEDULER,
        "if not (block_id in invalid_block_ids or block_id in blocks_to_evict):",
        "if block_id not in invalid_block_ids:",
        setups="failed",
        examples=(1500, 6000),
    ),
    Mutant(
        "rows that did not come are noticed with the next ones",
        MANAGER,
        "            if not in_flight.requests.keys() <= set(req_ids):\n",
        "            if False:\n",
    ),
    Mutant(
        "blocks of a request that ended before its load failed stay cached",
        SCHEDULER,
        "        if self.load_steps and request.first_step > self.output_step:\n",
        "        if False:\n",
        setups="loads",
    ),
    Mutant(
        "token of a preempted request whose load failed counts",
        SCHEDULER,
        "                    and request.first_step >= step\n",
        "                    and False\n",
        setups="loads and end",
    ),
    Mutant(
        "blocks shared with a request that ended before its load failed count as loaded",
        SCHEDULER,
        "            invalid_block_ids = invalid_block_ids | self.unsure_blocks\n",
        "",
        setups="request_that_left",
    ),
    Mutant(
        "steps in flight count for the next part of a session",
        SCHEDULER,
        "        request.first_valid_step = self.step + 1\n        request.num_output_pl",
        "        request.num_output_pl",
        setups="sessions",
    ),
    Mutant(
        "placeholders of a session's part count for the next",
        SCHEDULER,
        "        request.num_output_placeholders = 0\n        request.num_computed",
        "        request.num_computed",
        setups="sessions",
    ),
    Mutant(
        "drafts after the end of a session's part count as computed",
        SCHEDULER,
        "            request.num_computed_tokens, request.num_tokens\n",
        "            request.num_computed_tokens, 10**9\n",
        setups="sessions",
    ),
    Mutant(
        "session keeps the hash of a block whose last token was thrown away",
        SCHEDULER,
        "        del session.block_hashes[num_computed_tokens // hash_block_size :]\n",
        "",
        setups="sessions",
    ),
    Mutant(
        "fault while a request is preempted ends the engine",
        MANAGER,
        "    @contain_errors\n    def release(",
        "    def release(",
    ),
    Mutant(
        "fault while a request ends ends the engine",
        MANAGER,
        "    @contain_errors\n    def free(",
        "    def free(",
    ),
    Mutant(
        "fault before the connector is asked ends the engine",
        KV_TRANSFER,
        "    @contain_errors\n    def _takes_kv(",
        "    def _takes_kv(",
        setups="connector",
    ),
    Mutant(
        "fault after the connector was asked ends the engine",
        KV_TRANSFER,
        "    @contain_errors\n    def _note_received(",
        "    def _note_received(",
        setups="connector",
    ),
    Mutant(
        "fault in steps that a failed load makes unsure ends the engine",
        KV_TRANSFER,
        "    @contain_errors\n    def discard_unsure_steps(",
        "    def discard_unsure_steps(",
        setups="batch and failed",
    ),
    Mutant(
        "fault while requests are set back ends the engine",
        KV_TRANSFER,
        "    @contain_errors\n    def rewind(",
        "    def rewind(",
        setups="failed and loads",
    ),
    Mutant(
        "fault while requests are ended ends the engine",
        MANAGER,
        "        except Exception:\n            logger.exception(",
        "        except ZeroDivisionError:\n            logger.exception(",
    ),
]
