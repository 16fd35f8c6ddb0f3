# SPDX-License-Identifier: Apache-2.0
"""A fault of the rows of one request, or of one step, ends the requests that it concerns with an
error. The engine and all other requests go on."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.distributed.aux_output_connector.connector import AuxOutputs
from vllm.v1.request import RequestStatus

_spec = importlib.util.spec_from_file_location(
    "connector_property", Path(__file__).with_name("test_connector.py")
)
assert _spec is not None
assert _spec.loader is not None
model: Any = importlib.util.module_from_spec(_spec)
sys.modules[_spec.name] = model
_spec.loader.exec_module(model)
block_hashes = model.block_hashes

# The victim's prompt takes two steps, in which it fills two blocks, and one of these at once.
VICTIM, OTHER, SILENT = "0", "1", "2"
PROMPTS = {VICTIM: list(range(11)), OTHER: [9, 8, 7], SILENT: [5] * 6}
Fault = Callable[[Any, pytest.MonkeyPatch], None]


def once(function: Callable[..., Any], concerns: Callable[..., bool]) -> Callable[..., Any]:
    """Raise at the first call that it concerns."""
    raised: list[bool] = []

    def call(*args: Any, **kwargs: Any) -> Any:
        if not raised and concerns(*args, **kwargs):
            raised.append(True)
            raise KeyError("a fault")
        return function(*args, **kwargs)

    return call


def fail_capture(engine: Any, patch: pytest.MonkeyPatch) -> None:
    buffer = engine.runner.connector._buffer
    patch.setattr(buffer, "capture", once(buffer.capture, lambda *_: True))


def fail_order(engine: Any, patch: pytest.MonkeyPatch) -> None:
    """The runner's positions of the victim skip some."""
    prepare = engine.runner.connector.prepare_output

    def prepare_output(batch: Any) -> Any:
        starts = batch.num_computed_tokens_np
        for i, req_id in enumerate(batch.req_ids):
            if req_id == VICTIM and starts[i] > 0:
                starts[i] += 30
        return prepare(batch)

    patch.setattr(engine.runner.connector, "prepare_output", prepare_output)


def lose_output(engine: Any, patch: pytest.MonkeyPatch) -> None:
    """The worker sends no rows of the victim."""

    def pack(step: AuxOutputs, outputs: Any, accepted: Any) -> Any:
        if VICTIM in step.request_ids:
            step.request_ids[step.request_ids.index(VICTIM)] = "?"
        return real_pack(step, outputs, accepted)

    real_pack = AuxOutputs.pack
    patch.setattr(AuxOutputs, "pack", pack)


def shorten_output(engine: Any, patch: pytest.MonkeyPatch) -> None:
    """The worker sends rows of other positions of the victim."""

    def pack(step: AuxOutputs, outputs: Any, accepted: Any) -> Any:
        if VICTIM in step.request_ids:
            step.token_ends[step.request_ids.index(VICTIM)] -= 2
        return real_pack(step, outputs, accepted)

    real_pack = AuxOutputs.pack
    patch.setattr(AuxOutputs, "pack", pack)


def lose_stored(engine: Any, patch: pytest.MonkeyPatch) -> None:
    """The store forgets the blocks of the victim's first step."""
    store = engine.runner.connector._store
    get = store.get_concatenated

    def forget(keys: Any) -> Any:
        store._queue.join()
        for key in keys:
            store._store._slots.pop(key, None)
        return get(keys)

    patch.setattr(store, "get_concatenated", forget)
    if hasattr(store, "find_missing"):
        find = store.find_missing
        patch.setattr(store, "find_missing", lambda keys: (_forget(store, keys), find(keys))[1])


def _forget(store: Any, keys: Any) -> None:
    store._queue.join()
    for key in keys:
        store._store._slots.pop(key, None)


def fail_step(name: str) -> Fault:
    def fault(engine: Any, patch: pytest.MonkeyPatch) -> None:
        connector = engine.runner.connector
        patch.setattr(connector, name, once(getattr(connector, name), lambda *_: True))

    return fault


def fail_hashes(engine: Any, patch: pytest.MonkeyPatch) -> None:
    """The scheduler cannot tell which blocks the victim has."""
    connector = engine.scheduler.aux_output_connector
    take = connector._take_new_hashes

    def concerns(request: Any, *_: Any) -> bool:
        return bool(request.request_id == VICTIM)

    patch.setattr(connector, "_take_new_hashes", once(take, concerns))


def fail_snapshot(engine: Any, patch: pytest.MonkeyPatch) -> None:
    """The worker cannot copy the rows of a step."""
    capturer = engine.runner.connector._capturer
    snapshot = once(capturer.snapshot_routing_data, lambda *_: True)
    patch.setattr(capturer, "snapshot_routing_data", snapshot)


def fail_publish(engine: Any, patch: pytest.MonkeyPatch) -> None:
    """The worker cannot store the rows of a step."""
    connector = engine.runner.connector
    publish = once(connector._publish_blocks, lambda batches, *_, **__: len(batches) > 0)
    patch.setattr(connector, "_publish_blocks", publish)


def fail_copy(engine: Any, patch: pytest.MonkeyPatch) -> None:
    """The rows of a step do not reach the host."""
    capturer = engine.runner.connector._capturer
    snapshot = capturer.snapshot_routing_data
    copy = once(torch.Tensor.to, lambda *_, **__: True)

    def snapshot_routing_data(*args: Any) -> Any:
        rows = snapshot(*args)
        return SimpleNamespace(to=lambda *a, **kw: copy(rows, *a, **kw))

    patch.setattr(capturer, "snapshot_routing_data", snapshot_routing_data)


def fail_store(engine: Any, patch: pytest.MonkeyPatch) -> None:
    store = engine.runner.connector._store._store
    patch.setattr(store, "put", once(store.put, lambda objects, **_: len(objects) > 0))


def fail_pack(engine: Any, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(AuxOutputs, "pack", once(AuxOutputs.pack, lambda *_: True))


# Faults of the victim, and of steps.
ONE: list[Fault] = [
    fail_capture,
    fail_order,
    fail_hashes,
    lose_output,
    shorten_output,
    lose_stored,
]
ALL: list[Fault] = [
    fail_step("_commit_output"),
    fail_step("_publish_blocks"),
    fail_snapshot,
    fail_copy,
    fail_store,
    fail_pack,
]


def check_nothing_is_left(engine: Any) -> None:
    """Of requests that ended, only stored rows that the scheduler counts are left."""
    engine.step([])  # brings the worker the end of the last requests
    worker, scheduler_side = engine.runner.connector, engine.scheduler.aux_output_connector
    worker._store._queue.join()
    assert not worker._requests
    assert not worker._slots
    assert not worker._states
    assert not worker._pending_outputs
    assert len(worker._buffer._free_slots) == len(worker._buffer._rows)
    for left in ("_unsent", "_sent_hash_counts", "_unsent_hashes", "_taken", "_takers"):
        assert not getattr(scheduler_side, left)
    for left in ("_emitted", "_rewound", "_finished_requests", "_loading"):
        assert not getattr(scheduler_side, left)
    keys = model.worker_side.routed_experts_keys(
        scheduler_side._kv_cached, str(scheduler_side._generation)
    )
    store = worker._store._store
    assert store._references == dict.fromkeys(keys, 1)
    assert store._lru.keys() <= store._slots.keys()


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("fault", [*ONE, *ALL])
def test_a_fault_ends_the_requests_that_it_concerns(
    fault: Fault, asynchronous: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    setup = model.Setup(asynchronous=asynchronous, depth=1 + asynchronous, also=("silent",))
    engine = model.Engine(setup)
    try:
        with monkeypatch.context() as patch:
            fault(engine, patch)
            for req_id, prompt in PROMPTS.items():
                more = {"return_routed_experts": False} if req_id == SILENT else {}
                engine.add(prompt, 6, **more)
            engine.drain()
        failed = {
            req_id
            for req_id, request in engine.requests.items()
            if request.status == RequestStatus.FINISHED_ERROR
        }
        assert failed == {VICTIM} if fault in ONE else {VICTIM} <= failed <= {VICTIM, OTHER}
        for req_id in engine.requests.keys() - failed:
            request = engine.requests[req_id]
            assert request.status == RequestStatus.FINISHED_LENGTH_CAPPED
            if req_id != SILENT:
                assert engine.ends[req_id] == request.num_tokens - 1
        # Who has the same prompt computes what is lost.
        engine.add(PROMPTS[VICTIM], 6)
        engine.drain()
        request = engine.requests["3"]
        assert request.status == RequestStatus.FINISHED_LENGTH_CAPPED
        assert engine.ends["3"] == request.num_tokens - 1
        check_nothing_is_left(engine)
    finally:
        engine.runner.connector.close()


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("name", ["_new_state", "_drop_lost_blocks", "_finish", "_publish_blocks"])
def test_a_fault_at_the_begin_of_a_step_does_no_harm_later(
    name: str,
    asynchronous: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """In the step of the fault, requests begin and end, and the scheduler retains stored rows.
    Prompts that were cached before are computed again."""
    setup = model.Setup(asynchronous=asynchronous, depth=1 + asynchronous)
    engine = model.Engine(setup)
    try:
        for prompt in PROMPTS.values():
            engine.add(prompt, 6)
        engine.drain()
        with monkeypatch.context() as patch:
            fail_step(name)(engine, patch)
            for prompt in PROMPTS.values():
                engine.add([1, *prompt], 6)
            engine.drain()
        later = len(engine.requests)
        for prompt in PROMPTS.values():
            engine.add(prompt, 6)
        engine.drain()
        for req_id in map(str, range(later, len(engine.requests))):
            assert engine.requests[req_id].status == RequestStatus.FINISHED_LENGTH_CAPPED
            assert engine.ends[req_id] == engine.requests[req_id].num_tokens - 1
        check_nothing_is_left(engine)
        assert "Auxiliary outputs that were not stored are lost." not in caplog.messages
    finally:
        engine.runner.connector.close()


def fail_begin(engine: Any, patch: pytest.MonkeyPatch) -> None:
    """The worker does not learn of new requests."""
    fail_step("_new_state")(engine, patch)


# Faults that leave the first blocks of a prompt without rows.
UNKNOWN: list[Fault] = [
    fail_begin,
    fail_capture,
    fail_snapshot,
    fail_copy,
    fail_step("_commit_output"),
    fail_publish,
]


@pytest.mark.parametrize("fault", UNKNOWN)
@pytest.mark.parametrize("start", [0, 4])
def test_no_request_takes_the_unknown_rows_of_a_failed_one(
    fault: Fault, start: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second request hits blocks that the first one computes in two steps."""
    engine = model.Engine(model.Setup())
    try:
        with monkeypatch.context() as patch:
            fault(engine, patch)
            engine.add(PROMPTS[VICTIM], 6)
            engine.add(PROMPTS[VICTIM], 6, start)
            engine.drain()
        assert engine.requests[VICTIM].status == RequestStatus.FINISHED_ERROR
    finally:
        engine.runner.connector.close()


@pytest.mark.parametrize("fault", UNKNOWN)
@pytest.mark.parametrize("asynchronous", [False, True])
def test_no_request_takes_stale_rows_in_place_of_those_of_a_failed_one(
    fault: Fault, asynchronous: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rows of the prompt's blocks are stored. Weights change without a reset, the blocks have
    left the GPU, and the rows of the request that computes them again are lost."""
    setup = model.Setup(asynchronous=asynchronous, depth=1 + asynchronous, num_blocks=13)
    engine = model.Engine(setup)
    try:
        prompt = PROMPTS[VICTIM]
        engine.add(prompt, 1)
        engine.drain()
        engine.add(list(range(model.VOCABULARY, model.VOCABULARY + model.MAX_LEN - 2)), 1)
        engine.drain()
        connector = engine.scheduler.aux_output_connector
        (block_hash, *_) = engine.requests["0"].block_hashes
        assert block_hash in connector._kv_cached
        assert connector._gpu_cached(block_hash) is None
        engine.runner.weights += 1
        with monkeypatch.context() as patch:
            fault(engine, patch)
            engine.add(prompt, 6)
            engine.add(prompt, 6)
            engine.drain()
        assert engine.requests["2"].status == RequestStatus.FINISHED_ERROR
        engine.add(prompt, 6)
        engine.drain()
        assert engine.requests["4"].status == RequestStatus.FINISHED_LENGTH_CAPPED
        check_nothing_is_left(engine)
    finally:
        engine.runner.connector.close()
