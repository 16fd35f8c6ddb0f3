# SPDX-License-Identifier: Apache-2.0
"""The message queue of the multiprocess executor carries rows from the worker to the scheduler
unchanged. test_ray.py tests the channels of Ray."""

from __future__ import annotations

import copy
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from vllm.distributed.device_communicators.shm_broadcast import MessageQueue
from vllm.v1.outputs import ModelRunnerOutput, RoutedExpertsLists

MOE_LAYERS = (0, 2, 3)
MOE_TOP_K = (4, 2, 4)


def make_output(num_rows: int, dtype: Any) -> ModelRunnerOutput:
    shape = (num_rows, 4, 8)
    rows = np.random.default_rng(num_rows).integers(np.iinfo(dtype).max + 1, size=shape)
    return ModelRunnerOutput(
        req_ids=["a"],
        req_id_to_index={"a": 0},
        sampled_token_ids=[[7]],
        routed_experts=RoutedExpertsLists(
            ["a"], np.array([num_rows]), np.array([0]), rows.astype(dtype), MOE_LAYERS, MOE_TOP_K
        ),
    )


def through_message_queue(output: ModelRunnerOutput) -> ModelRunnerOutput:
    writer = MessageQueue(n_reader=1, n_local_reader=1, max_chunk_bytes=4 << 20)
    reader = MessageQueue.create_from_handle(writer.export_handle(), 0)
    # What does not fit into a chunk goes through a socket: both ends at once.
    with ThreadPoolExecutor(2) as pool:
        ready = [pool.submit(end.wait_until_ready) for end in (writer, reader)]
        [end.result(timeout=60) for end in ready]
        sent = pool.submit(writer.enqueue, output, timeout=60)
        received = pool.submit(reader.dequeue, timeout=60).result(timeout=60)
        sent.result(timeout=60)
    # Large rows lie in the memory of the queue, which is freed with it.
    return copy.deepcopy(received)


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
# Within a message; beside it, in the queue's shared memory; too large for that.
@pytest.mark.parametrize("num_rows", [0, 5, 40_000, 140_000])
def test_rows_are_carried_unchanged(dtype: Any, num_rows: int) -> None:
    sent = make_output(num_rows, dtype).routed_experts
    received = through_message_queue(make_output(num_rows, dtype)).routed_experts
    assert isinstance(received, RoutedExpertsLists)
    assert received.rows.dtype == dtype
    np.testing.assert_array_equal(received.rows, sent.rows)
    assert received[:3] == sent[:3]
    assert received.moe_layers == MOE_LAYERS
    assert received.moe_top_k == MOE_TOP_K
