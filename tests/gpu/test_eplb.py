# SPDX-License-Identifier: Apache-2.0
"""Asynchronous EPLB on one GPU, with delayed streams and events.

One rank cannot exchange experts with another, but moves them through the same buffer: every
rebalance is a random permutation of all experts of all layers. `checks/eplb.py` covers the
schedules of several ranks, `python -m gpu.eplb` whole engines.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("no GPU", allow_module_level=True)

DEVICE = "cuda:0"
BACKEND = "nccl"
TIMEOUT_S = 120.0
LAYERS, EXPERTS, WIDTH = 4, 16, 1 << 16
# About a millisecond.
CYCLES = 2_000_000


def delay() -> None:
    """Keeps the current stream busy, so that what is launched after it comes late."""
    torch.cuda._sleep(CYCLES)


def test_event_orders_streams_of_two_threads() -> None:
    """The consumer's stream reads late; the producer's would overwrite at once."""
    from vllm.distributed.eplb.eplb_utils import CpuGpuEvent

    rounds = 200
    buffer = torch.zeros(WIDTH, device=DEVICE)
    seen = torch.zeros(rounds, 2, device=DEVICE)
    consumed = CpuGpuEvent()
    ready: list[threading.Event] = [threading.Event() for _ in range(rounds)]
    errors: list[BaseException] = []

    def produce() -> None:
        try:
            torch.accelerator.set_device_index(torch.device(DEVICE).index)
            stream = torch.cuda.Stream()
            for round_ in range(rounds):
                if round_:
                    consumed.wait(stream)
                with torch.cuda.stream(stream):
                    buffer.fill_(round_ + 1)
                stream.synchronize()
                ready[round_].set()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=produce, daemon=True)
    thread.start()
    for round_ in range(rounds):
        assert ready[round_].wait(TIMEOUT_S), errors
        delay()
        seen[round_, 0] = buffer.min()
        seen[round_, 1] = buffer.max()
        if round_ + 1 < rounds:
            consumed.record()
    thread.join(TIMEOUT_S)
    assert not errors
    expected = torch.arange(1, rounds + 1.0).unsqueeze(1).expand(-1, 2)
    assert torch.equal(seen.cpu(), expected)


class Model:
    """Expert e of layer i has the weights 100 * i + e."""

    num_moe_layers = LAYERS
    num_routed_experts = num_logical_experts = num_physical_experts = EXPERTS
    num_redundant_experts = 0
    num_expert_groups = 1
    moe_layers = ()

    def __init__(self) -> None:
        experts = torch.arange(float(EXPERTS), device=DEVICE).unsqueeze(1)
        self.expert_weights = [
            [(100 * layer + experts).repeat(1, WIDTH) for _ in range(2)] for layer in range(LAYERS)
        ]

    def set_eplb_state(self, *args: Any) -> None:
        pass


class RandomPolicy:
    """Random permutations of the experts."""

    @staticmethod
    def rebalance_experts(*args: Any) -> torch.Tensor:
        return torch.stack([torch.randperm(EXPERTS) for _ in range(LAYERS)])


@pytest.fixture
def group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A world of one rank."""
    from vllm.distributed import parallel_state
    from vllm.distributed.eplb import eplb_state

    torch.distributed.init_process_group(
        BACKEND, f"file://{tmp_path / 'rendezvous'}", rank=0, world_size=1
    )
    group = parallel_state.GroupCoordinator([[0]], 0, BACKEND, False, group_name="ep")
    for name in ("_EP", "_EPLB", "_WORLD"):
        monkeypatch.setattr(parallel_state, name, group)
    monkeypatch.setattr(eplb_state, "get_node_count", lambda: 1)
    yield
    torch.distributed.destroy_process_group()


@pytest.fixture
def eplb(group: None) -> Iterator[Any]:
    from vllm.config.parallel import EPLBConfig
    from vllm.distributed.eplb.eplb_state import EplbState

    config = EPLBConfig(window_size=2, step_interval=6, use_async=True, communicator="torch_gloo")
    state = EplbState(SimpleNamespace(eplb_config=config), torch.device(DEVICE))  # type: ignore
    state.add_model(
        Model(),  # type: ignore[arg-type]
        SimpleNamespace(model="model", compute_hash=lambda: "model"),  # type: ignore[arg-type]
    )
    state.policy = RandomPolicy  # type: ignore[assignment]
    state.start_async_loop()
    yield state
    state.shutdown()
    assert not state.async_worker.is_alive()


def check_weights(eplb: Any) -> torch.Tensor:
    """Launched on the main stream, where the model would run: what it would read."""
    (state,) = eplb.model_states.values()
    wrong = torch.zeros((), dtype=torch.long, device=DEVICE)
    for layer, weights in enumerate(state.model.expert_weights):
        expected = (100 * layer + state.physical_to_logical_map[layer]).unsqueeze(1)
        for weight in weights:
            wrong += (weight != expected).sum()
    return wrong


def test_model_always_reads_the_experts_of_its_map(
    eplb: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.distributed.eplb import eplb_state

    moves = 0
    move_from_buffer = eplb_state.move_from_buffer

    def late_move(**kwargs: Any) -> None:
        nonlocal moves
        moves += 1
        # The host runs far ahead of the stream that reads the buffer.
        delay()
        move_from_buffer(**kwargs)

    monkeypatch.setattr(eplb_state, "move_from_buffer", late_move)
    wrong = []
    (state,) = eplb.model_states.values()
    first = state.physical_to_logical_map.clone()
    deadline = time.monotonic() + TIMEOUT_S
    while moves < 20 * LAYERS:
        assert time.monotonic() < deadline, f"{moves} layers moved"
        eplb.step()
        wrong.append(check_weights(eplb))
    assert int(torch.stack(wrong).sum()) == 0
    assert not torch.equal(first, state.physical_to_logical_map)


def test_error_of_the_worker_is_raised(eplb: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.distributed.eplb import async_worker

    def broken(**kwargs: Any) -> None:
        raise ValueError("broken on purpose")

    for _ in range(12):
        eplb.step()
    monkeypatch.setattr(async_worker, "transfer_layer", broken)

    def step_until_error() -> None:
        deadline = time.monotonic() + TIMEOUT_S
        while time.monotonic() < deadline:
            eplb.step()

    with pytest.raises(RuntimeError, match="EP rank 0 has failed") as raised:
        step_until_error()
    assert "in broken" in str(raised.value)
    assert isinstance(raised.value.__cause__, ValueError)
    assert int(check_weights(eplb)) == 0


@pytest.mark.parametrize("steps", [0, 3, 5, 8])
def test_worker_is_joined(eplb: Any, steps: int) -> None:
    for _ in range(steps):
        eplb.step()
    eplb.shutdown()
    assert not eplb.async_worker.is_alive()
    assert eplb.async_worker.error is None
    assert int(check_weights(eplb)) == 0
