# SPDX-License-Identifier: Apache-2.0
"""`make soak`: ten thousand requests, some of them aborted, leave nothing behind."""

from __future__ import annotations

import gc
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import psutil
import pytest

from tests.behaviour.conftest import BLOCK, random_prompt, running

if TYPE_CHECKING:
    from vllm.v1.core.sched.scheduler import Scheduler

pytestmark = pytest.mark.slow

NUM_REQUESTS = int(os.environ.get("SOAK_REQUESTS", "10000"))
AT_ONCE = 24
NUM_BLOCKS = 64


def litter() -> set[str]:
    """Shared memory segments, and temporary files of vLLM."""
    shared = {f"shm/{name}" for name in os.listdir("/dev/shm")}
    temporary = {f"tmp/{name}" for name in os.listdir(tempfile.gettempdir()) if "vllm" in name}
    return shared | temporary


class State:
    """What the scheduler keeps for rows."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.manager = scheduler.routed_experts
        self.block_pool = scheduler.kv_cache_manager.block_pool

    @property
    def num_blocks(self) -> int:
        return int(self.manager.rows.is_usable.sum())

    def assert_nothing_is_left(self) -> None:
        assert not self.manager.requests
        assert not self.manager.steps_in_flight
        blocks = self.block_pool.blocks
        usable = self.manager.rows.is_usable.nonzero()[0].tolist()
        assert all(blocks[block_id].block_hash is not None for block_id in usable)


def test_soak(checkpoint: Callable[..., Path]) -> None:
    soak(checkpoint(), State)


def soak(model: Path, state_class: type[State]) -> None:
    from vllm import SamplingParams

    process = psutil.Process()
    litter_before = litter()
    children_before = {child.pid for child in process.children(recursive=True)}
    rng = np.random.default_rng(0)
    prefixes = [random_prompt(900 + i, 3 * BLOCK) for i in range(12)]
    resident: list[int] = []
    aborted = 0
    with running(model, num_gpu_blocks_override=NUM_BLOCKS) as llm:
        engine = llm.llm_engine
        state = state_class(engine.engine_core.engine_core.scheduler)
        outstanding: dict[str, int] = {}
        added = finished = 0
        while finished + aborted < NUM_REQUESTS:
            while len(outstanding) < AT_ONCE and added < NUM_REQUESTS:
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
            if (finished + aborted) % (NUM_REQUESTS // 10) == 0:
                gc.collect()
                resident.append(process.memory_info().rss)
            assert state.num_blocks <= NUM_BLOCKS
        while engine.has_unfinished_requests():
            engine.step()
        state.assert_nothing_is_left()
    assert aborted > NUM_REQUESTS // 50
    # The first third fills caches of Python and torch.
    assert resident[-1] < resident[len(resident) // 3] * 1.02 + (8 << 20), [
        r >> 20 for r in resident
    ]
    gc.collect()
    assert litter() <= litter_before
    left = [c.cmdline() for c in process.children(recursive=True) if c.pid not in children_before]
    # Python's own helper process stays.
    assert not [command for command in left if "resource_tracker" not in " ".join(command)]
