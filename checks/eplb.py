# SPDX-License-Identifier: Apache-2.0
"""`make stress-eplb`: asynchronous EPLB in random schedules of real threads, without a GPU.

Each schedule is a few ranks in one process, each with the installed vLLM's `EplbState` in a main
thread and its own async worker thread. Streams are queues that a thread works off late and in its
own time, as a GPU does, and events order them as CUDA's do: to wait for one that was never recorded
does not wait. Threads and streams pause at random, in ways that a seed decides. What is checked:

- a layer's weights are what the map of the layer says, on every rank, after every step;
- the device reads from the buffer what was last written for that layer, and nothing newer;
- an error injected into one worker is raised by every rank's main thread in the same step;
- finishing a rebalance at any moment, as before elastic EP scales, leaves none under way;
- shutdown at any moment joins the worker;
- nobody waits for ever: a schedule that takes too long ends the run, with all threads' stacks.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import faulthandler
import logging
import queue
import random
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch

WATCHDOG_S = 60
MAX_STEPS = 3000
REBALANCES = 3
local = threading.local()


class Injected(Exception):
    """What a schedule makes a worker die of."""


class Aborted(Exception):
    """A transfer was interrupted."""


def pause(rng: random.Random) -> None:
    """Mostly nothing, sometimes another thread's turn, rarely a long while."""
    chance = rng.random()
    if chance < 0.3:
        time.sleep(0)
    elif chance < 0.4:
        time.sleep(rng.random() * 2e-4)
    elif chance < 0.41:
        time.sleep(2e-3)


class Stream:
    """Work in order, done by a thread of its own."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.work: queue.Queue[Callable[[], object] | None] = queue.Queue()
        self.error: BaseException | None = None
        threading.Thread(target=self._run, daemon=True).start()

    def launch(self, work: Callable[[], object]) -> None:
        self.work.put(work)

    def synchronize(self) -> None:
        self.work.join()

    def close(self) -> None:
        self.work.put(None)

    def _run(self) -> None:
        while (work := self.work.get()) is not None:
            pause(self.rng)
            try:
                work()
            except BaseException as error:
                self.error = self.error or error
            self.work.task_done()


class Event:
    """As a CUDA event."""

    def __init__(self) -> None:
        self.done: threading.Event | None = None

    def record(self, stream: Stream | None = None) -> None:
        done = self.done = threading.Event()
        (stream or local.rank.stream).launch(done.set)

    def wait(self, stream: Stream | None = None) -> None:
        done = self.done
        if done is not None:
            (stream or local.rank.stream).launch(lambda: done.wait(WATCHDOG_S))


class Group:
    """A process group of the ranks of one schedule."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.barrier = threading.Barrier(world.size)
        self.slots: list[Any] = [None] * world.size

    def size(self) -> int:
        return self.world.size

    def rank(self) -> int:
        return local.rank.number

    def exchange(self, value: Any) -> list[Any]:
        """Every rank's value, in every rank."""
        pause(local.rank.rng)
        self.slots[self.rank()] = value
        self.barrier.wait(WATCHDOG_S)
        values = list(self.slots)
        self.barrier.wait(WATCHDOG_S)
        return values


@dataclass
class World:
    """What the ranks of one schedule share."""

    size: int
    seed: int
    layers: int
    fail: tuple[int, str, int] | None  # rank, where, after how many calls
    stop: int | None  # stop after this many steps
    finish: int | None  # finish the rebalance after this many steps
    ranks: list[Rank] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.ep = Group(self)


class Communicator:
    """All ranks enter a transfer, or those in it wait until they are aborted."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.barrier = threading.Barrier(world.size)

    def set_stream(self, stream: Stream) -> None:
        pass

    def execute(self) -> None:
        try:
            self.barrier.wait(WATCHDOG_S)
        except threading.BrokenBarrierError:
            raise Aborted from None

    def abort(self) -> None:
        self.barrier.abort()


class Rank:
    """One rank of a schedule."""

    def __init__(self, world: World, number: int, communicator: Communicator) -> None:
        from vllm.distributed.eplb import eplb_state

        self.world = world
        self.number = number
        self.rng = random.Random(world.seed * 31 + number)
        self.worker_rng = random.Random(world.seed * 37 + number)
        self.stream = Stream(world.seed * 41 + number)
        self.streams = [self.stream]
        self.calls: collections.Counter[str] = collections.Counter()
        self.buffer: tuple[int, int] | None = None  # rebalance, layer
        self.moved: list[tuple[int, int]] = []
        self.layer_maps: list[list[int]] = [[0, 1] * world.size for _ in range(world.layers)]
        self.error: BaseException | None = None
        self.steps = 0
        config = SimpleNamespace(
            eplb_config=SimpleNamespace(use_async=True, log_balancedness_interval=1)
        )
        state = self.state = eplb_state.EplbState(config, torch.device("cpu"))
        state.is_async = True
        state.cuda_device_index = 0
        state.expert_load_window_size = 1
        state.expert_rearrangement_step_interval = 3
        experts = 2 * world.size
        state.num_valid_physical_experts = experts
        state.policy = SimpleNamespace(rebalance_experts=self.rebalance_experts)
        maps = torch.tensor(self.layer_maps)
        model = SimpleNamespace(
            num_moe_layers=world.layers,
            num_logical_experts=2,
            num_physical_experts=experts,
            num_expert_groups=1,
            expert_weights=list(range(world.layers)),
        )
        self.model_state = eplb_state.EplbModelState(
            physical_to_logical_map=maps,
            logical_to_physical_map=torch.full((world.layers, 2, experts), -1),
            logical_replica_count=torch.zeros(world.layers, 2, dtype=torch.long),
            expert_load_pass=torch.zeros(world.layers, experts, dtype=torch.int32),
            expert_load_window=torch.zeros(1, world.layers, experts, dtype=torch.int32),
            model_name="model",
            model=model,
            expert_buffer=[],
            rebalanced=False,
            eplb_stats=None,
            cuda_device_index=0,
            communicator=communicator,
        )
        state.model_states = {"model": self.model_state}

    def visit(self, where: str) -> None:
        """A worker is somewhere: it may pause, or die."""
        pause(self.worker_rng)
        self.calls[where] += 1
        if self.world.fail == (self.number, where, self.calls[where]):
            raise Injected(f"rank {self.number} in {where}")

    # What stands for vLLM's own functions.

    def rebalance_experts(self, *args: Any) -> torch.Tensor:
        """New maps, the same on every rank: the experts rotated by one in some layers."""
        self.visit("policy")
        rng = random.Random(self.world.seed * 43 + self.calls["policy"])
        current = args[-1]
        return torch.stack([row.roll(rng.randrange(2)) for row in current])

    def transfer_layer(self, *, expert_weights: int, cuda_stream: Stream, **kw: Any) -> Any:
        self.visit("before transfer")
        kw["communicator"].execute()
        mark = (self.calls["policy"], expert_weights)

        def write() -> None:
            self.buffer = mark

        cuda_stream.launch(write)
        self.visit("after transfer")
        return mark

    def move_from_buffer(self, *, expert_weights: int, transfer_metadata: Any, **kw: Any) -> None:
        pause(self.rng)

        def read() -> None:
            if self.buffer != transfer_metadata:
                raise AssertionError(f"{self.buffer} in the buffer for {transfer_metadata}")
            self.layer_maps[expert_weights] = kw["new_indices"].tolist()

        self.stream.launch(read)
        self.moved.append(transfer_metadata)

    def run(self) -> None:
        local.rank = self
        try:
            self.state.start_async_loop()
            while len(self.moved) < REBALANCES * self.world.layers or self.world.fail:
                if self.steps == self.world.stop:
                    break
                if self.steps == MAX_STEPS:
                    raise AssertionError(f"{len(self.moved)} layers moved in {MAX_STEPS} steps")
                self.steps += 1
                pause(self.rng)
                self.state.step()
                if self.steps == self.world.finish:
                    self.finish()
                if self.rng.random() < 0.2:
                    self.check()
            self.check()
        except BaseException as error:
            self.error = error
        finally:
            pause(self.rng)
            self.state.shutdown()

    def finish(self) -> None:
        """As before elastic EP scales."""
        self.state.finish_async_rearrangement()
        if self.model_state.rebalanced or self.calls["before transfer"] != len(self.moved):
            raise AssertionError("a rebalance is still under way")
        self.check()

    def check(self) -> None:
        """What the device did, once it has done it."""
        self.stream.synchronize()
        for stream in self.streams:
            if stream.error:
                raise stream.error
        maps = self.model_state.physical_to_logical_map.tolist()
        if maps != self.layer_maps:
            raise AssertionError(f"weights {self.layer_maps}, maps {maps}")


def all_reduce(tensor: torch.Tensor, op: Any = None, group: Any = None) -> None:
    values = [value.clone() for value in group.exchange(tensor.clone())]
    stacked = torch.stack(values)
    minimum = op == torch.distributed.ReduceOp.MIN
    tensor.copy_(stacked.amin(0) if minimum else stacked.sum(0))


def coordinator() -> Any:
    rank = local.rank
    group = rank.world.ep
    return SimpleNamespace(
        cpu_group=group,
        device_group=group,
        rank_in_group=rank.number,
        broadcast_object=lambda value, src: group.exchange(value)[src],
    )


@contextlib.contextmanager
def fakes() -> Iterator[None]:
    """vLLM's modules, on ranks that are threads."""
    from vllm.distributed.eplb import async_worker, eplb_state

    class Worker(async_worker.AsyncEplbWorker):
        """Knows its rank."""

        def __init__(self, target: Callable[[], None], rank: int) -> None:
            owner = local.rank

            def run() -> None:
                local.rank = owner
                target()

            super().__init__(run, rank)
            self.joins = 0

        def join(self, timeout: float | None = None) -> None:
            """Hardly waits for a transfer to end by itself."""
            self.joins += 1
            super().join(0.002 if self.joins == 1 else WATCHDOG_S)

    def stream(device: Any = None) -> Stream:
        rank = local.rank
        rank.streams.append(Stream(rank.world.seed * 47 + rank.number))
        return rank.streams[-1]

    quiet = logging.getLogger("quiet")
    quiet.setLevel(logging.CRITICAL + 1)
    with contextlib.ExitStack() as stack:
        for owner, name, value in (
            (torch.cuda, "Event", Event),
            (torch.cuda, "Stream", stream),
            (torch.cuda, "stream", lambda stream: contextlib.nullcontext()),
            (torch.accelerator, "set_device_index", lambda index: None),
            (async_worker, "AsyncEplbWorker", Worker),
            (async_worker, "get_eplb_group", coordinator),
            (async_worker, "transfer_layer", lambda **kw: local.rank.transfer_layer(**kw)),
            (eplb_state, "move_from_buffer", lambda **kw: local.rank.move_from_buffer(**kw)),
            (eplb_state, "get_ep_group", coordinator),
            (eplb_state, "get_node_count", lambda: 1),
            (eplb_state, "all_reduce", all_reduce),
            (async_worker, "logger", quiet),
            (eplb_state, "logger", quiet),
        ):
            stack.enter_context(patch.object(owner, name, value))
        yield


def run_schedule(seed: int) -> str:
    """One schedule; says what kind it was."""
    rng = random.Random(seed)
    size = rng.choice([1, 2, 2, 3])
    layers = rng.randint(1, 4)
    kind = rng.choice(["run", "run", "fail", "stop"])
    fail = stop = None
    if kind == "fail":
        where = rng.choice(["policy", "before transfer", "after transfer"])
        most = REBALANCES if where == "policy" else REBALANCES * layers
        fail = (rng.randrange(size), where, rng.randint(1, most))
    elif kind == "stop":
        stop = rng.randrange(12)
    finish = rng.randrange(12) if rng.random() < 0.3 else None
    world = World(size, seed, layers, fail, stop, finish)
    communicators = Communicator(world)
    world.ranks = [Rank(world, number, communicators) for number in range(size)]
    mains = [threading.Thread(target=rank.run, daemon=True) for rank in world.ranks]
    for main in mains:
        main.start()
    deadline = time.monotonic() + WATCHDOG_S
    for main in mains:
        main.join(max(0.0, deadline - time.monotonic()))
    stuck = [rank.number for rank, main in zip(world.ranks, mains, strict=True) if main.is_alive()]
    if stuck:
        faulthandler.dump_traceback(all_threads=True)
        raise AssertionError(f"seed {seed} ({kind}): ranks {stuck} hang")
    for rank in world.ranks:
        for stream in rank.streams:
            stream.close()
    try:
        judge(world)
    except AssertionError as error:
        for rank in world.ranks:
            if rank.error:
                traceback.print_exception(rank.error)
        raise AssertionError(f"seed {seed} ({kind}): {error}") from None
    return kind


def judge(world: World) -> None:
    """What must be true of a schedule that has ended."""
    steps = {rank.steps for rank in world.ranks}
    assert len(steps) == 1, f"ranks ended in different steps: {steps}"
    moved = [rank.moved for rank in world.ranks]
    assert moved.count(moved[0]) == len(moved), f"ranks moved different layers: {moved}"
    expected = [(1 + i // world.layers, i % world.layers) for i in range(len(moved[0]))]
    assert moved[0] == expected, f"layers moved out of order: {moved[0]}"
    for rank in world.ranks:
        worker = rank.state.async_worker
        assert worker is not None, "a worker was not started"
        assert not worker.is_alive(), "a worker was not joined"
        if world.fail is None:
            assert rank.error is None, f"rank {rank.number} failed"
            continue
        number, where, _ = world.fail
        assert isinstance(rank.error, RuntimeError), f"rank {rank.number}: {rank.error!r}"
        for part in (
            f"EP rank {number} has failed",
            f"Injected: rank {number} in {where}",
            "visit",
        ):
            assert part in str(rank.error), rank.error
        cause = rank.error.__cause__
        assert isinstance(cause, Injected) or rank.number != number


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--schedules", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=0, help="of the first schedule")
    args = parser.parse_args(argv)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    torch.set_num_threads(1)
    kinds: collections.Counter[str] = collections.Counter()
    start = time.monotonic()
    try:
        with fakes():
            for seed in range(args.seed, args.seed + args.schedules):
                faulthandler.dump_traceback_later(2 * WATCHDOG_S, exit=True)
                kinds[run_schedule(seed)] += 1
    finally:
        faulthandler.cancel_dump_traceback_later()
        sys.setswitchinterval(interval)
    counts = ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))
    print(f"{args.schedules} schedules in {time.monotonic() - start:.0f} s: {counts}; no harm")
    return 0


if __name__ == "__main__":
    sys.exit(main())
