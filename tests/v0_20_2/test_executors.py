# SPDX-License-Identifier: Apache-2.0
"""The message queue of the multiprocess executor carries rows from the worker to the scheduler
unchanged. test_ray.py tests the channels of Ray."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from vllm.distributed.device_communicators.shm_broadcast import MessageQueue
from vllm.v1.outputs import ModelRunnerOutput, RoutedExpertsLists


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
# The rows fit into a message, or into the queue's shared memory, or into neither.
@pytest.mark.parametrize("num_rows", [0, 5, 40_000, 140_000])
def test_rows_are_carried_unchanged(dtype: Any, num_rows: int) -> None:
    shape = (num_rows, 4, 8)
    rows = np.random.default_rng(num_rows).integers(np.iinfo(dtype).max + 1, size=shape)
    sent = RoutedExpertsLists(
        ["a"], np.array([num_rows]), np.array([0]), rows.astype(dtype), (0, 2, 3), (4, 2, 4)
    )
    output = ModelRunnerOutput(["a"], {"a": 0}, [[7]], routed_experts=sent)
    writer = MessageQueue(n_reader=1, n_local_reader=1, max_chunk_bytes=4 << 20)
    reader = MessageQueue.create_from_handle(writer.export_handle(), 0)
    # What does not fit into a chunk goes through a socket: both ends at once.
    with ThreadPoolExecutor(2) as pool:
        ready = [pool.submit(end.wait_until_ready) for end in (writer, reader)]
        [end.result(timeout=60) for end in ready]
        writing = pool.submit(writer.enqueue, output, timeout=60)
        received = pool.submit(reader.dequeue, timeout=60).result(timeout=60).routed_experts
        writing.result(timeout=60)
    assert isinstance(received, RoutedExpertsLists)
    assert received.rows.dtype == dtype
    np.testing.assert_array_equal(received.rows, sent.rows)
    assert received[:3] == sent[:3]
    assert received[4:] == sent[4:]
