# SPDX-License-Identifier: Apache-2.0
"""What can break for routed experts in a step. Each fault ends requests, never the engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest import mock

import numpy as np
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import ModelRunnerOutput, RoutedExpertsLists


def lose_rows(lists: RoutedExpertsLists, index: int) -> RoutedExpertsLists | None:
    """The worker fails at the begin of the step, and returns no rows."""
    return None


def lose_request(lists: RoutedExpertsLists, index: int) -> RoutedExpertsLists:
    """The worker does not know that one request asks."""
    is_kept = np.arange(len(lists.req_ids)) != index % len(lists.req_ids)
    return lists._replace(
        req_ids=[r for r, kept in zip(lists.req_ids, is_kept, strict=False) if kept],
        num_rows=lists.num_rows[is_kept],
        positions=lists.positions[is_kept],
        rows=lists.rows[is_kept.repeat(lists.num_rows)],
    )


def lose_first_row(lists: RoutedExpertsLists, index: int) -> RoutedExpertsLists:
    """The copy of one request's rows begins one row late."""
    index %= len(lists.req_ids)
    is_lost = np.arange(len(lists.req_ids)) == index
    first = int(lists.num_rows[:index].sum())
    return lists._replace(
        num_rows=lists.num_rows - is_lost,
        positions=lists.positions + is_lost,
        rows=np.delete(lists.rows, first, axis=0),
    )


OF_STEP: dict[str, Callable[[RoutedExpertsLists, int], RoutedExpertsLists | None]] = {
    fault.__name__: fault for fault in (lose_rows, lose_request, lose_first_row)
}
# What fails in the scheduler: an attribute of the manager, its rows or its prefix cache is gone.
METHODS = {
    "update": ("rows", "_find_places"),
    "pack": ("rows", "read"),
    "limit": ("manager", "get_start"),
    "on_blocks_cached": ("prefix_cache", "_block_pool"),
    "on_block_evicted": ("prefix_cache", "_rows"),
    "on_step_scheduled": ("manager", "_begin"),
    "returns_rows": ("manager", "returns_rows"),
    "num_received": ("manager", "num_received"),
}
IN_SCHEDULE = [*METHODS][2:]
# While a failed load is handled.
METHODS["discard_steps_in_flight"] = ("manager", "discard_steps_in_flight")
# While a request is preempted or aborted.
LEAVING = {"release": ("manager", "requests"), "free": ("manager", "num_received")}
METHODS |= LEAVING
FAULTS = [*OF_STEP, *METHODS]


@contextmanager
def break_scheduler(scheduler: Scheduler, fault: str) -> Iterator[None]:
    """While the scheduler does what can have this fault."""
    holder, attribute = METHODS[fault]
    holders = {
        "manager": scheduler.routed_experts,
        "rows": scheduler.routed_experts.rows,
        "prefix_cache": scheduler.kv_cache_manager.block_pool.listener,
    }
    with mock.patch.object(holders[holder], attribute, None):
        yield


@contextmanager
def break_rows(
    output: ModelRunnerOutput, scheduler: Scheduler, fault: str, index: int
) -> Iterator[None]:
    """While the scheduler processes the output of a step."""
    if fault in METHODS:
        with break_scheduler(scheduler, fault):
            yield
        return
    output.routed_experts = OF_STEP[fault](output.routed_experts, index)
    yield
