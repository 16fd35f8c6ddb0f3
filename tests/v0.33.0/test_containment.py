# SPDX-License-Identifier: Apache-2.0
"""A fault of the rows of one request, or of one step, ends the requests that it concerns with an
error. The engine and all other requests go on."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
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
            step.token_starts[step.request_ids.index(VICTIM)] -= 2
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


def fail_store(engine: Any, patch: pytest.MonkeyPatch) -> None:
    store = engine.runner.connector._store._store
    patch.setattr(store, "put", once(store.put, lambda objects, **_: len(objects) > 0))


def fail_pack(engine: Any, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(AuxOutputs, "pack", once(AuxOutputs.pack, lambda *_: True))


# Faults of the victim, and of steps.
ONE: list[Fault] = [fail_capture, fail_order, lose_output, shorten_output, lose_stored]
ALL: list[Fault] = [
    fail_step("_commit_output"),
    fail_step("_publish_blocks"),
    fail_store,
    fail_pack,
]


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
        # Nothing is left of the requests.
        engine.step([])
        connector = engine.runner.connector
        assert not connector._requests
        assert len(connector._buffer._free_slots) == len(connector._buffer._rows)
    finally:
        engine.runner.connector.close()
