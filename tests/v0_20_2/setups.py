# SPDX-License-Identifier: Apache-2.0
"""How the engine of the property test runs: which interleavings there can be."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from vllm.v1.core.routed_experts_kv_transfer import RoutedExpertsKVTransfer
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    SlidingWindowSpec,
)

from harness import scheduling
from harness.scheduling import make_config
from tests.v0_20_2.connector import Connector
from tests.v0_20_2.kv import KVCache
from tests.v0_20_2.model import Worker

BLOCK = 4
MAX_LEN = 48
# Each token of a layer with a sliding window reads this many tokens, its own among them.
WINDOW = 6


@dataclass(frozen=True)
class Setup:
    """The parts of an engine's configuration that matter to the order of things."""

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
    # The most sessions. They keep their blocks between two inputs, so there must be many blocks.
    sessions: int = 0


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
    "hybrid, asynchronous batch queue": Setup(
        asynchronous=True, depth=3, sliding_window=True, num_blocks=24
    ),
    # A hit holds only the blocks of the window, so earlier blocks may be evicted meanwhile. A step
    # has room for several prompts, so one prompt may find what another computes.
    "window only": Setup(sliding_window=True, full_attention=False, chunk=40),
    "window only, batch queue": Setup(depth=3, sliding_window=True, full_attention=False),
    "window only, asynchronous batch queue": Setup(
        asynchronous=True, depth=4, sliding_window=True, full_attention=False
    ),
    # More requests at a time than there is room for at first.
    "crowd": Setup(num_blocks=160, chunk=40, num_seqs=40, crowd=8),
    # A request may be preempted in the pass that has scheduled it already.
    "priorities": Setup(priorities=True),
    "no prefix cache": Setup(caching=False),
    "decode context parallel": Setup(context_parallel=2),
    "sessions": Setup(asynchronous=True, depth=2, num_blocks=60, sessions=4),
    "sessions, batch queue": Setup(asynchronous=True, depth=3, num_blocks=60, sessions=4),
    "sessions, drafts": Setup(drafts=3, num_blocks=60, sessions=4),
    "sessions, asynchronous drafts": Setup(
        asynchronous=True, depth=2, drafts=3, num_blocks=60, sessions=4
    ),
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
    # Blocks of a request that ended are used again at once.
    # The series refuses to compute failed loads again with several steps in flight.
    "few blocks, failed loads": Setup(connector=True, chunk=24),
    "few blocks, failed loads end": Setup(
        asynchronous=True, depth=2, connector=True, chunk=24, loads_end=True
    ),
    "few blocks, batch queue, failed loads end": Setup(
        asynchronous=True, depth=3, connector=True, chunk=24, loads_end=True
    ),
}


def make_engine_parts(setup: Setup) -> tuple[Scheduler, Worker]:
    """The real scheduler, and the naive worker."""
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
    groups, reaches = [], []
    if setup.full_attention:
        groups.append(KVCacheGroupSpec(["full"], FullAttentionSpec(**shape)))
        reaches.append(MAX_LEN)
    if setup.sliding_window:
        window = SlidingWindowSpec(**shape, sliding_window=WINDOW)
        groups.append(KVCacheGroupSpec(["window"], window))
        reaches.append(WINDOW - 1)
    kv_cache = KVCacheConfig(setup.num_blocks, [], groups)
    scheduler = scheduling.make_scheduler(config, kv_cache, setup.drafts)
    assert scheduler.block_size == BLOCK
    proposes = setup.asynchronous and setup.drafts > 0
    kv = KVCache(setup.num_blocks, BLOCK)
    worker = Worker(kv, MAX_LEN + setup.drafts, reaches, proposes)
    if setup.connector:
        scheduler.connector = Connector(kv)
        scheduler.routed_experts_kv_transfer = RoutedExpertsKVTransfer(
            scheduler.routed_experts, scheduler.connector
        )
        scheduler.recompute_kv_load_failures = not setup.loads_end
    return scheduler, worker
