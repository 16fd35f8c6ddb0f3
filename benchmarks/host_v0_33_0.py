# SPDX-License-Identifier: Apache-2.0
"""Measures what rows cost the host on the line v0.33.0, beside the release itself.

    make install ON=v0.33.0
    make demo-pristine ON=v0.33.0    # builds the release; the demo fails, as it must
    .venv-v0.33.0/bin/python -m benchmarks.host_v0_33_0 --out benchmarks/results/v0.33.0/host-cpu.md

It needs no GPU. Scheduler, both sides of the connector and message encoding of the installed series
and of the release run with generated tokens and random rows in the shape of DeepSeek-V3: 61 layers,
top-8, one byte per id. Builds take turns, each time in a new process, in which engines without and
with rows take turns, step by step: other work on the machine changes both. All requests fill
their blocks in the same steps, so each of a block's steps has a median of its own, and these are
averaged. Times are processor time of the process, and include the threads that store rows and those
of sockets. Not measured: capture on the GPU, garbage collection, and the front end's work after
each output has its rows.
"""

from __future__ import annotations

import argparse
import gc
import json
import mmap
import os
import pickle
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np

from benchmarks.builds import ROOT
from benchmarks.common import table
from harness.stand_ins import model_config

PRISTINE = ROOT / "build/v0.33.0/pristine/site"
LAYERS, TOP_K, BLOCK = 61, 8, 16
PARTS = ("scheduler", "scheduler to worker", "worker", "worker to scheduler", "to the front end")
# The engines of each build: whether the flag is on, and requests ask.
ENGINES = {
    "release": {"flag off": (False, None), "flag on": (True, None)},
    "series": {"flag off": (False, None), "nobody asks": (True, False), "all ask": (True, True)},
}


class Engine:
    """The scheduler and the worker's side of the connector, with requests that decode."""

    def __init__(self, requests: int, prompt: int, flag: bool, asks: bool | None) -> None:
        import torch
        import zmq
        from vllm.config import DeviceConfig, VllmConfig
        from vllm.sampling_params import SamplingParams
        from vllm.utils.hashing import sha256
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
        from vllm.v1.core.sched.scheduler import Scheduler
        from vllm.v1.engine import EngineCoreOutputs
        from vllm.v1.engine.core import EngineCoreProc
        from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
        from vllm.v1.request import Request
        from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder
        from vllm.v1.structured_output import StructuredOutputManager

        init_none_hash(sha256)
        tokens = prompt + 1024
        config = VllmConfig(device_config=DeviceConfig("cpu"))
        config.model_config = model_config(tokens)
        num_blocks = requests * (prompt // BLOCK + 24) + 1
        config.cache_config.num_gpu_blocks = num_blocks
        config.cache_config.enable_prefix_caching = True
        config.cache_config.block_size = BLOCK
        config.scheduler_config.max_num_seqs = requests
        config.scheduler_config.max_num_batched_tokens = requests * prompt
        config.scheduler_config.max_num_scheduled_tokens = requests * prompt
        config.scheduler_config.async_scheduling = False
        config.aux_output_config.enable_return_routed_experts = flag
        spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=1, dtype=torch.float32)
        kv_cache = KVCacheConfig(num_blocks, [], [KVCacheGroupSpec(["full"], spec)])
        self.scheduler = Scheduler(
            vllm_config=config,
            kv_cache_config=kv_cache,
            structured_output_manager=StructuredOutputManager(config),
            block_size=BLOCK,
            log_stats=False,
        )
        self.scheduler.use_v2_model_runner = True
        rng = np.random.default_rng(0)
        self.rows = rng.integers(256, size=(requests * prompt, LAYERS, TOP_K), dtype=np.uint8)
        self.connector = self._make_connector(config, kv_cache) if flag else None
        self.encoder = MsgpackEncoder()
        self.decoder = MsgpackDecoder(EngineCoreOutputs)
        self.send_frames = EngineCoreProc._send_msg_tracking_payload
        context = zmq.Context()
        self.sender, self.receiver = context.socket(zmq.PUSH), context.socket(zmq.PULL)
        for socket in (self.sender, self.receiver):
            socket.set_hwm(0)
        path = f"ipc://@vllm-host-{os.getpid()}-{id(self)}"  # an abstract socket, without a file
        self.receiver.bind(path)
        self.sender.connect(path)
        self.spent = dict.fromkeys(PARTS, 0.0)
        more = {} if asks is None else {"return_routed_experts": asks}
        for index in range(requests):
            self.scheduler.add_request(
                Request(
                    request_id=f"request-{index}",
                    prompt_token_ids=rng.integers(50_000, size=prompt).tolist(),
                    sampling_params=SamplingParams(max_tokens=1000, ignore_eos=True, **more),
                    pooling_params=None,
                    block_hasher=get_request_block_hasher(BLOCK, sha256),
                )
            )

    def _make_connector(self, config: Any, kv_cache: Any) -> Any:
        import torch
        from vllm.distributed.aux_output_connector import worker as worker_side

        def snapshot(count: int, rows: np.ndarray | None = None) -> torch.Tensor:
            # A new one each step, as the copy from the GPU is, which takes no time of the host.
            start = time.process_time()
            taken = (self.rows[:count] if rows is None else self.rows[rows]).copy()
            self.spent["worker"] -= time.process_time() - start
            return torch.from_numpy(taken)

        capturer = SimpleNamespace(
            shape_per_token=(LAYERS, TOP_K),
            output_dtype_name="uint8",
            snapshot_routing_data=snapshot,
        )
        sizes = {
            "scheduler_config": config.scheduler_config,
            "cache_config": config.cache_config,
            "parallel_config": config.parallel_config,
            "kv_transfer_config": None,
            "aux_output_config": config.aux_output_config,
            "max_concurrent_batches": 1,
        }
        with (
            mock.patch.multiple(
                worker_side,
                RoutedExpertsCapturer=lambda **_: capturer,
                bind_routed_experts_capturer=lambda *_: None,
                get_tp_group=lambda: SimpleNamespace(is_first_rank=True),
            ),
            mock.patch("vllm.distributed.parallel_state._PP", SimpleNamespace(is_last_rank=True)),
        ):
            connector = worker_side.AuxOutputWorkerConnector(
                vllm_config=SimpleNamespace(**sizes), model=None, kv_cache_config=kv_cache
            )
        # As in an engine that has run for a while, the store's memory was used before.
        arena = connector._store._store._arena
        for page in range(0, len(arena), mmap.PAGESIZE):
            arena[page] = 1
        return connector

    def timed(self, part: str, call: Callable[[], Any]) -> Any:
        start = time.process_time()
        result = call()
        self.spent[part] += time.process_time() - start
        return result

    def step(self) -> None:
        scheduled = self.timed("scheduler", self.scheduler.schedule)
        scheduled_there = self.timed("scheduler to worker", lambda: send(scheduled))
        output = self.run(scheduled_there)
        output = self.timed("worker to scheduler", lambda: send(output))
        outputs = self.timed(
            "scheduler", lambda: self.scheduler.update_from_output(scheduled, output)
        )
        self.timed("to the front end", lambda: self.encode(outputs.values()))

    def encode(self, messages: Iterable[Any]) -> None:
        for message in messages:
            self.send_frames(self.sender, self.encoder.encode(message))
            received = self.decoder.decode(self.receiver.recv_multipart(copy=False))
            # In the release they come with each output.
            if hasattr(received, "distribute_routed_experts"):
                received.distribute_routed_experts()

    def run(self, scheduled: Any) -> Any:
        from vllm.v1.outputs import ModelRunnerOutput

        req_ids = list(scheduled.num_scheduled_tokens)
        output = ModelRunnerOutput(
            req_ids=req_ids,
            req_id_to_index={req_id: i for i, req_id in enumerate(req_ids)},
            sampled_token_ids=[[7]] * len(req_ids),
        )
        if self.connector is not None:
            counts = list(scheduled.num_scheduled_tokens.values())
            starts = {new.req_id: new.num_computed_tokens for new in scheduled.scheduled_new_reqs}
            cached = scheduled.scheduled_cached_reqs
            starts.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
            batch = SimpleNamespace(
                req_ids=req_ids,
                query_start_loc_np=np.cumsum([0, *counts]),
                num_computed_tokens_np=np.array([starts[req_id] for req_id in req_ids]),
            )
            metadata = scheduled.aux_output_connector_metadata
            output.aux_output_connector_output = self.timed(
                "worker", lambda: self.take_rows(metadata, batch)
            )
        return output

    def take_rows(self, metadata: Any, batch: SimpleNamespace) -> Any:
        self.connector.begin_step(metadata)
        pending = self.connector.prepare_output(batch)
        if pending is None:
            return None
        ones = np.ones(len(batch.req_ids), np.int32)
        pending.enqueue_cpu_copy(ones, ones - 1)
        return pending.process_output()


def send(output: Any) -> Any:
    """What the message queue between processes does."""
    buffers: list[pickle.PickleBuffer] = []
    data = pickle.dumps(output, protocol=5, buffer_callback=buffers.append)
    return pickle.loads(data, buffers=[bytes(buffer.raw()) for buffer in buffers])


def measure(build: str, requests: int, prompt: int, steps: int) -> dict[str, list[list[float]]]:
    """Milliseconds of each decode step by engine, and by part."""
    engines = {
        name: Engine(requests, prompt, flag, asks) for name, (flag, asks) in ENGINES[build].items()
    }
    for engine in engines.values():
        for _ in range(3):
            engine.step()
    gc.collect()
    gc.disable()
    found: dict[str, list[list[float]]] = {name: [] for name in engines}
    for _ in range(steps):
        for name, engine in engines.items():
            engine.spent = dict.fromkeys(PARTS, 0.0)
            engine.step()
            found[name].append([1e3 * spent for spent in engine.spent.values()])
    return found


def average(steps: np.ndarray) -> np.ndarray:
    """Of (steps, ...): the mean over a block's steps, each the median of its repetitions."""
    rounds = steps.reshape(-1, BLOCK, *steps.shape[1:])
    return np.median(rounds, axis=0).mean(axis=0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=1024)
    parser.add_argument("--prompt", type=int, default=64, help="tokens of each prompt")
    parser.add_argument("--blocks", type=int, default=4, help="of 16 decode steps, in each process")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, help="Markdown file to write")
    parser.add_argument("--build", choices=ENGINES, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.build:
        found = measure(args.build, args.requests, args.prompt, args.blocks * BLOCK)
        print(json.dumps(found))
        return
    if not PRISTINE.is_dir():
        sys.exit(f"error: no release in {PRISTINE}: run make demo-pristine ON=v0.33.0")
    times: dict[tuple[str, str], list[list[float]]] = {}
    for _ in range(args.rounds):
        for build in ENGINES:
            command = [sys.executable, "-m", "benchmarks.host_v0_33_0", "--build", build]
            for name in ("requests", "prompt", "blocks"):
                command += [f"--{name}", str(getattr(args, name))]
            path = os.pathsep.join([*([str(PRISTINE)] if build == "release" else []), str(ROOT)])
            done = subprocess.run(
                command,
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": path},
                stdout=subprocess.PIPE,
                text=True,
                check=True,
            )
            for name, steps in json.loads(done.stdout.splitlines()[-1]).items():
                times.setdefault((build, name), []).extend(steps)
    lines = [
        "# Host time of a decode step on the line v0.33.0",
        "",
        f"{args.requests} decodes, {LAYERS} layers, top-{TOP_K}; milliseconds of processor time a "
        f"step, {args.rounds} processes of {args.blocks * BLOCK} steps for each build. "
        f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, "
        f"load {os.getloadavg()[1]:.0f}.",
        "",
        "The first row of a build is the time, the others are what they take more at that step.",
        "",
    ]
    table_rows = []
    for (build, name), steps in times.items():
        rows = np.array(steps)
        off = np.array(times[build, "flag off"])
        if name != "flag off":
            rows = rows - off
        cells = [
            f"{value:.2f}" if name == "flag off" else f"{value:+.2f}"
            for value in [*average(rows), average(rows.sum(axis=1))]
        ]
        table_rows.append([f"{build}, {name}", *cells])
    text = "\n".join([*lines, table(["", *PARTS, "**all**"], table_rows)])
    print(text)
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(text)


if __name__ == "__main__":
    main()
