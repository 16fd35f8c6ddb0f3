# SPDX-License-Identifier: Apache-2.0
"""A fault of the rows of one request, or of one step, ends the requests that it concerns with an
error. The engine and all other requests go on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.distributed.aux_output_connector.connector import AuxOutputs
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import init_none_hash
from vllm.v1.request import RequestStatus

from tests.v0_33_0.connector.engine import Engine
from tests.v0_33_0.connector.setups import Setup

# The victim's prompt takes two steps, in which it fills two blocks, and one of these at once.
VICTIM = "0"
OTHER = "1"
SILENT = "2"
PROMPTS = {VICTIM: list(range(11)), OTHER: [9, 8, 7], SILENT: [5] * 6}
# Breaks an engine while the patches last.
Fault = Callable[[Any, pytest.MonkeyPatch], None]


@pytest.fixture(scope="module", autouse=True)
def block_hashes() -> None:
    init_none_hash(sha256)


@pytest.fixture(params=[False, True], ids=["synchronous", "asynchronous"])
def engine(request: pytest.FixtureRequest) -> Iterator[Any]:
    """An engine with as many KV blocks as one request of the greatest length fills."""
    asynchronous = request.param
    setup = Setup(
        asynchronous=asynchronous, depth=1 + asynchronous, num_blocks=13, also=("silent",)
    )
    engine = Engine(setup)
    yield engine
    engine.runner.connector.close()


def once(function: Callable[..., Any], concerns: Callable[..., bool]) -> Callable[..., Any]:
    """Raise at the first call that it concerns."""
    raised: list[bool] = []

    def call(*args: Any, **kwargs: Any) -> Any:
        if not raised and concerns(*args, **kwargs):
            raised.append(True)
            raise KeyError("a fault")
        return function(*args, **kwargs)

    return call


def worker(engine: Any) -> Any:
    return engine.runner.connector


def fail(
    find: Callable[[Any], Any], name: str, concerns: Callable[..., bool] = lambda *_, **__: True
) -> Fault:
    """A method, of what `find` finds in the engine, raises at its first call that is concerned."""

    def fault(engine: Any, patch: pytest.MonkeyPatch) -> None:
        owner = find(engine)
        patch.setattr(owner, name, once(getattr(owner, name), concerns))

    return fault


def change_output(change: Callable[[AuxOutputs, int], None]) -> Fault:
    """The worker sends something else of the victim, whose index `change` gets."""

    def fault(engine: Any, patch: pytest.MonkeyPatch) -> None:
        real_pack = AuxOutputs.pack

        def pack(step: AuxOutputs, *args: Any) -> Any:
            if VICTIM in step.request_ids:
                change(step, step.request_ids.index(VICTIM))
            return real_pack(step, *args)

        patch.setattr(AuxOutputs, "pack", pack)

    return fault


def lose_rows(step: AuxOutputs, index: int) -> None:
    step.request_ids[index] = "?"


def move_rows(step: AuxOutputs, index: int) -> None:
    step.token_ends[index] -= 2


def skip_positions(engine: Any, patch: pytest.MonkeyPatch) -> None:
    """The runner's positions of the victim skip some."""
    prepare = worker(engine).prepare_output

    def prepare_output(batch: Any) -> Any:
        starts = batch.num_computed_tokens_np
        for i, req_id in enumerate(batch.req_ids):
            if req_id == VICTIM and starts[i] > 0:
                starts[i] += 30
        return prepare(batch)

    patch.setattr(worker(engine), "prepare_output", prepare_output)


def lose_stored(engine: Any, patch: pytest.MonkeyPatch) -> None:
    """The store forgets the blocks of the victim's first step."""
    store = worker(engine)._store

    def forgetting(look: Callable[..., Any]) -> Callable[..., Any]:
        def look_again(keys: Any) -> Any:
            store._queue.join()
            for key in keys:
                store._store._objects.pop(key, None)
            return look(keys)

        return look_again

    patch.setattr(store, "get_concatenated", forgetting(store.get_concatenated))


def fail_copy(engine: Any, patch: pytest.MonkeyPatch) -> None:
    """The rows of a step do not reach the host."""
    capturer = worker(engine)._capturer
    snapshot = capturer.snapshot_routing_data
    copy = once(torch.Tensor.to, lambda *_, **__: True)

    def snapshot_routing_data(*args: Any) -> Any:
        rows = snapshot(*args)
        return SimpleNamespace(to=lambda *a, **kw: copy(rows, *a, **kw))

    patch.setattr(capturer, "snapshot_routing_data", snapshot_routing_data)


def concerns_victim(request: Any, *_: Any) -> bool:
    return bool(request.request_id == VICTIM)


def has_some(blocks: Any, *_: Any, **__: Any) -> bool:
    return len(blocks) > 0


BEGIN = fail(worker, "_new_state")
CAPTURE = fail(lambda engine: worker(engine)._buffer, "capture")
SNAPSHOT = fail(lambda engine: worker(engine)._capturer, "snapshot_routing_data")
COMMIT = fail(worker, "_commit_output")
# Faults of the victim, and of steps.
HASHES = fail(
    lambda engine: engine.scheduler.aux_output_connector, "_take_new_hashes", concerns_victim
)
ONE: dict[str, Fault] = {
    "no output": change_output(lose_rows),
    "output of other positions": change_output(move_rows),
}
ALL: dict[str, Fault] = {
    "order": skip_positions,
    "hashes": HASHES,
    "no stored rows": lose_stored,
    "capture": CAPTURE,
    "commit": COMMIT,
    "publish": fail(worker, "_publish_blocks"),
    "snapshot": SNAPSHOT,
    "copy": fail_copy,
    "store": fail(lambda engine: worker(engine)._store._store, "put", has_some),
    "pack": fail(lambda _: AuxOutputs, "pack"),
}
# Faults that leave the first blocks of a prompt without rows.
UNKNOWN: dict[str, Fault] = {
    "begin": BEGIN,
    "capture": CAPTURE,
    "snapshot": SNAPSHOT,
    "copy": fail_copy,
    "commit": COMMIT,
    "publish": fail(worker, "_publish_blocks", has_some),
}


def assert_has_all_rows(engine: Any, req_id: str) -> None:
    request = engine.requests[req_id]
    assert request.status == RequestStatus.FINISHED_LENGTH_CAPPED
    assert engine.ends[req_id] == request.num_tokens - 1


@pytest.mark.parametrize("name", [*ONE, *ALL])
def test_a_fault_ends_the_requests_that_it_concerns(
    engine: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        (ONE | ALL)[name](engine, patch)
        for req_id, prompt in PROMPTS.items():
            more = {"return_routed_experts": False} if req_id == SILENT else {}
            engine.add(prompt, 6, **more)
        engine.drain()
    failed = {
        req_id
        for req_id, request in engine.requests.items()
        if request.status == RequestStatus.FINISHED_ERROR
    }
    assert failed == {VICTIM} if name in ONE else {VICTIM} <= failed <= {VICTIM, OTHER}
    assert engine.requests[SILENT].status == RequestStatus.FINISHED_LENGTH_CAPPED
    if OTHER not in failed:
        assert_has_all_rows(engine, OTHER)
    # Who has the same prompt computes what is lost.
    engine.add(PROMPTS[VICTIM], 6)
    engine.drain()
    assert_has_all_rows(engine, "3")
    engine.check_nothing_is_left()


@pytest.mark.parametrize("name", ["_new_state", "_teardown", "_publish_blocks"])
def test_a_fault_at_the_begin_of_a_step_does_no_harm_later(
    engine: Any, name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """In the step of the fault, requests begin and end, and the scheduler retains stored rows.
    Prompts that were cached before are computed again."""
    for prompt in PROMPTS.values():
        engine.add(prompt, 6)
    engine.drain()
    with monkeypatch.context() as patch:
        fail(worker, name)(engine, patch)
        for prompt in PROMPTS.values():
            engine.add([1, *prompt], 6)
        engine.drain()
    later = len(engine.requests)
    for prompt in PROMPTS.values():
        engine.add(prompt, 6)
    engine.drain()
    for req_id in map(str, range(later, len(engine.requests))):
        assert_has_all_rows(engine, req_id)
    engine.check_nothing_is_left()
    assert "Auxiliary outputs that were not stored are lost." not in caplog.messages


def test_blocks_of_an_aborted_request_whose_hashes_were_not_sent_have_no_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The request is aborted before its error. A step in flight caches its next blocks."""
    engine = Engine(Setup(asynchronous=True, depth=4, num_blocks=13))
    with monkeypatch.context() as patch:
        HASHES(engine, patch)
        engine.add(PROMPTS[VICTIM], 6)
        for _ in range(3):
            engine.schedule([])
    engine.abort(0)
    engine.drain()
    engine.check()
    engine.runner.connector.close()


@pytest.mark.parametrize("fault", UNKNOWN.values(), ids=UNKNOWN)
@pytest.mark.parametrize("start", [0, 4])
def test_no_request_takes_the_unknown_rows_of_a_failed_one(
    engine: Any, fault: Fault, start: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second request hits blocks that the first one computes in two steps."""
    with monkeypatch.context() as patch:
        fault(engine, patch)
        engine.add(PROMPTS[VICTIM], 6)
        engine.add(PROMPTS[VICTIM], 6, start)
        engine.drain()
    assert engine.requests[VICTIM].status == RequestStatus.FINISHED_ERROR


@pytest.mark.parametrize("fault", UNKNOWN.values(), ids=UNKNOWN)
def test_no_request_takes_stale_rows_in_place_of_those_of_a_failed_one(
    engine: Any, fault: Fault, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The prompt's blocks have left the GPU, and so have their rows. Weights change without a
    reset, and the rows of the request that computes the blocks again are lost."""
    prompt = PROMPTS[VICTIM]
    engine.add(prompt, 1)
    engine.drain()
    engine.evict()
    connector = engine.scheduler.aux_output_connector
    (block_hash, *_) = engine.requests["0"].block_hashes
    assert block_hash not in connector._kv_cached
    engine.runner.weights += 1
    with monkeypatch.context() as patch:
        fault(engine, patch)
        engine.add(prompt, 6)
        engine.add(prompt, 6)
        engine.drain()
    assert engine.requests["2"].status == RequestStatus.FINISHED_ERROR
    engine.add(prompt, 6)
    engine.drain()
    assert_has_all_rows(engine, "4")
    engine.check_nothing_is_left()
