# SPDX-License-Identifier: Apache-2.0
"""Thousands of requests, some of them aborted, leave nothing behind."""

from __future__ import annotations

import gc
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from harness.lines import LINES
from tests.behaviour.conftest import BLOCK, random_prompt, running, scheduler_of

pytestmark = pytest.mark.slow

AT_ONCE = 24
NUM_BLOCKS = 64


def litter() -> set[str]:
    """Shared memory segments, and temporary files of vLLM."""
    shared = {f"shm/{name}" for name in os.listdir("/dev/shm")}
    temporary = {f"tmp/{name}" for name in os.listdir(tempfile.gettempdir()) if "vllm" in name}
    return shared | temporary


def usable_blocks(manager: Any) -> list[int]:
    """Of v0.20.2: blocks with rows in the prefix cache."""
    from vllm.v1.core.routed_experts_rows import NEVER

    return (manager.rows.cached_step != NEVER).nonzero()[0].tolist()


def count_blocks(scheduler: Any) -> int:
    """KV blocks whose rows the scheduler keeps."""
    if hasattr(scheduler, "routed_experts"):
        return len(usable_blocks(scheduler.routed_experts))
    return len(scheduler.aux_output_connector._kv_cached)


def assert_nothing_is_left(scheduler: Any) -> None:
    """The scheduler keeps rows of cached blocks alone."""
    if hasattr(scheduler, "routed_experts"):
        manager, blocks = scheduler.routed_experts, scheduler.kv_cache_manager.block_pool.blocks
        assert not manager.requests
        assert not manager.steps_in_flight
        assert all(blocks[b].block_hash is not None for b in usable_blocks(manager))
    else:
        connector = scheduler.aux_output_connector
        kept = (connector._unsent, connector._sent_hash_counts, connector._unsent_hashes)
        assert not any([*kept, connector._emitted, connector._rewound, connector._loading])


def test_soak(checkpoint: Callable[..., Path], line: str) -> None:
    from vllm import SamplingParams

    num_requests = int(os.environ.get("SOAK_REQUESTS", LINES[line].tests["soak_requests"]))
    process = psutil.Process()
    litter_before = litter()
    children_before = {child.pid for child in process.children(recursive=True)}
    rng = np.random.default_rng(0)
    prefixes = [random_prompt(900 + i, 3 * BLOCK) for i in range(12)]
    resident: list[int] = []
    aborted = 0
    with running(checkpoint(), num_gpu_blocks_override=NUM_BLOCKS) as llm:
        engine, scheduler = llm.llm_engine, scheduler_of(llm)
        outstanding: dict[str, int] = {}
        added = finished = 0
        while finished + aborted < num_requests:
            while len(outstanding) < AT_ONCE and added < num_requests:
                prefix = prefixes[rng.integers(len(prefixes))][: rng.integers(1, 3 * BLOCK)]
                params = SamplingParams(
                    max_tokens=int(rng.integers(1, 12)),
                    ignore_eos=True,
                    return_routed_experts=bool(rng.random() < 0.7),
                )
                prompt = {"prompt_token_ids": [*prefix, int(rng.integers(4, 700))]}
                request_id = engine.add_request(str(added), prompt, params)
                outstanding[str(added)] = len(prompt["prompt_token_ids"])
                assert request_id
                added += 1
            for output in engine.step():
                if output.finished and output.request_id in outstanding:
                    prompt_len = outstanding.pop(output.request_id)
                    completion = output.outputs[0]
                    if completion.routed_experts is not None:
                        wanted = prompt_len + len(completion.token_ids) - 1
                        assert len(completion.routed_experts) == wanted
                    finished += 1
            if outstanding and rng.random() < 0.15:
                victim = list(outstanding)[rng.integers(len(outstanding))]
                engine.abort_request([victim])
                del outstanding[victim]
                aborted += 1
            if (finished + aborted) % (num_requests // 10) == 0:
                gc.collect()
                resident.append(process.memory_info().rss)
            assert count_blocks(scheduler) <= NUM_BLOCKS
        while engine.has_unfinished_requests():
            engine.step()
        assert_nothing_is_left(scheduler)
    assert aborted > num_requests // 50
    # The first third fills caches of Python and torch.
    assert resident[-1] < resident[len(resident) // 3] * 1.02 + (8 << 20), [
        r >> 20 for r in resident
    ]
    gc.collect()
    assert litter() <= litter_before
    left = [c.cmdline() for c in process.children(recursive=True) if c.pid not in children_before]
    # Python's own helper process stays.
    assert not [command for command in left if "resource_tracker" not in " ".join(command)]
