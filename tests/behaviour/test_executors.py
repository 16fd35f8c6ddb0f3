# SPDX-License-Identifier: Apache-2.0
"""The ways from the worker to the scheduler keep rows unchanged: the message queue of the
multiprocess executor, and Ray's pickling."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import cloudpickle
import numpy as np
import pytest

from harness.stand_ins import kv_cache_manager
from tests.behaviour.conftest import random_prompt

if TYPE_CHECKING:
    from vllm.v1.outputs import ModelRunnerOutput

MOE_LAYERS = (0, 2, 3)
MOE_TOP_K = (4, 2, 4)


def make_output(num_rows: int, dtype: Any) -> ModelRunnerOutput:
    from vllm.v1.outputs import ModelRunnerOutput, RoutedExpertsLists

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
    from vllm.distributed.device_communicators.shm_broadcast import MessageQueue

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


def through_pickle(output: ModelRunnerOutput) -> ModelRunnerOutput:
    return pickle.loads(pickle.dumps(output))


def through_ray_channel(output: ModelRunnerOutput) -> ModelRunnerOutput:
    """As in Ray: arrays lie in shared memory and are read-only until the executor detaches them."""
    from vllm.v1.executor.ray_utils import detach_zero_copy_from_model_runner_output

    buffers: list[pickle.PickleBuffer] = []
    data = cloudpickle.dumps(output, protocol=5, buffer_callback=buffers.append)
    received = cloudpickle.loads(data, buffers=[bytes(buffer.raw()) for buffer in buffers])
    if (lists := received.routed_experts) is not None:
        assert not lists.rows.flags.writeable
        detach_zero_copy_from_model_runner_output(received)
        assert received.routed_experts.rows.flags.writeable
    return received


@pytest.mark.parametrize("carry", [through_message_queue, through_pickle, through_ray_channel])
@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
# Within a message; beside it, in the queue's shared memory; too large for that.
@pytest.mark.parametrize("num_rows", [0, 5, 40_000, 140_000])
def test_rows_are_carried_unchanged(
    carry: Callable[[ModelRunnerOutput], ModelRunnerOutput], dtype: Any, num_rows: int
) -> None:
    from vllm.v1.outputs import RoutedExpertsLists

    sent = make_output(num_rows, dtype).routed_experts
    received = carry(make_output(num_rows, dtype)).routed_experts
    assert isinstance(received, RoutedExpertsLists)
    assert received.rows.dtype == dtype
    np.testing.assert_array_equal(received.rows, sent.rows)
    assert received[:3] == sent[:3]
    assert received.moe_layers == MOE_LAYERS
    assert received.moe_top_k == MOE_TOP_K


@pytest.mark.parametrize("carry", [through_pickle, through_ray_channel])
def test_output_without_rows_carries_none(
    carry: Callable[[ModelRunnerOutput], ModelRunnerOutput],
) -> None:
    output = make_output(5, np.uint8)
    output.routed_experts = None
    assert carry(output).routed_experts is None
    assert len(pickle.dumps(output)) < 1000


def test_scheduler_keeps_nothing_of_the_memory_that_rows_came_in() -> None:
    """The memory is a ring: a later step overwrites an earlier one."""
    from vllm import SamplingParams
    from vllm.v1.core.routed_experts_manager import RoutedExpertsManager
    from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
    from vllm.v1.request import Request

    params = SamplingParams(return_routed_experts=True, routed_experts_prompt_start=0)
    request = Request("a", random_prompt(0, 5), params, None)
    step = make_output(5, np.uint8).routed_experts
    expected = step.rows.copy()
    manager = RoutedExpertsManager(kv_cache_manager())
    manager.on_request_scheduled(request, 0)
    manager.on_step_scheduled(1)
    manager.update(step, {"a": request}, 1)
    request.append_output_token_ids(7)
    outputs = EngineCoreOutputs(outputs=[EngineCoreOutput("a", [7])])
    manager.pack({request.client_index: outputs}, {"a": request})
    step.rows[:] = 0
    np.testing.assert_array_equal(np.concatenate(outputs.routed_experts.rows), expected)
