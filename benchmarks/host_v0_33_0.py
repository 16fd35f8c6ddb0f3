# SPDX-License-Identifier: Apache-2.0
"""Measures what rows cost the host on the line v0.33.0, beside the release itself.

    make install ON=v0.33.0
    make demo-pristine ON=v0.33.0    # builds the release; the demo fails, as it must
    .venv-v0.33.0/bin/python -m benchmarks.host_v0_33_0 --out benchmarks/results/v0.33.0/host-cpu.md

It needs no GPU. The installed series and the release run with generated tokens and random rows. The
scheduler, both sides of the connector, message encoding and the front end's output processor take
part. Rows have the shape of DeepSeek-V3: 61 layers, top-8, one byte per id.

Builds take turns, each time in a new process. In it, engines without and with rows take turns, step
by step: other work on the machine changes both. Times are processor time of the process. They
include the threads that store rows and the threads of sockets. Not measured: capture on the GPU,
garbage collection.

**Decodes**: all requests fill their blocks in the same steps, so each of a block's steps has a
median of its own, and these are averaged.

**Groups**: all requests have one prompt and arrive together. The step that computes the prompt is
measured, and the one in which all requests end: it joins the rows of each answer. The peak of
memory is measured in a process of its own, in the step of the prompt. It includes the front end.
The store's memory is allocated before.
"""

from __future__ import annotations

import argparse
import gc
import json
import mmap
import os
import pickle
import platform
import re
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
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
PARTS = (
    "scheduler",
    "scheduler to worker",
    "worker",
    "worker to scheduler",
    "to the front end",
    "front end",
)
GROUP_PROMPT, GROUP_OUTPUT = 8192, 4
# The engines of each build: whether the flag is on, and requests ask.
ENGINES = {
    "release": {"flag off": (False, None), "flag on": (True, None)},
    "series": {"flag off": (False, None), "nobody asks": (True, False), "all ask": (True, True)},
}


class Engine:
    """The scheduler, the worker's side of the connector, and the front end."""

    def __init__(
        self, requests: int, prompt: int, flag: bool, asks: bool | None, group: bool = False
    ) -> None:
        import torch
        import zmq
        from vllm.config import DeviceConfig, VllmConfig
        from vllm.utils.hashing import sha256
        from vllm.v1.core.kv_cache_utils import init_none_hash
        from vllm.v1.core.sched.scheduler import Scheduler
        from vllm.v1.engine import EngineCoreOutputs
        from vllm.v1.engine.core import EngineCoreProc
        from vllm.v1.engine.output_processor import OutputProcessor
        from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
        from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder
        from vllm.v1.structured_output import StructuredOutputManager

        init_none_hash(sha256)
        tokens = prompt + 1024
        config = VllmConfig(device_config=DeviceConfig("cpu"))
        config.model_config = model_config(tokens)
        own = 24 if group else prompt // BLOCK + 24
        num_blocks = requests * own + (2 * prompt // BLOCK if group else 0) + 1
        batch = 16_384 if group else requests * prompt
        config.cache_config.num_gpu_blocks = num_blocks
        config.cache_config.enable_prefix_caching = True
        config.cache_config.block_size = BLOCK
        config.scheduler_config.max_num_seqs = requests
        config.scheduler_config.max_num_batched_tokens = batch
        config.scheduler_config.max_num_scheduled_tokens = batch
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
        self.rng = np.random.default_rng(0)
        self.rows = self.rng.integers(256, size=(batch, LAYERS, TOP_K), dtype=np.uint8)
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
        self.processor = OutputProcessor(tokenizer=None, log_stats=False)
        self.asks = {} if asks is None else {"return_routed_experts": asks}
        self.num_requests = 0

    def add(self, requests: int, prompt: int, output: int, group: bool = False) -> None:
        """Add requests, in a group all with one prompt."""
        from vllm.sampling_params import RequestOutputKind, SamplingParams
        from vllm.utils.hashing import sha256
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher
        from vllm.v1.engine import EngineCoreRequest
        from vllm.v1.request import Request

        hasher = get_request_block_hasher(BLOCK, sha256)
        for index in range(requests):
            if index == 0 or not group:
                tokens = self.rng.integers(50_000, size=prompt).tolist()
            request = EngineCoreRequest(
                request_id=f"request-{self.num_requests}",
                external_req_id=f"request-{self.num_requests}",
                prompt_token_ids=tokens,
                mm_features=None,
                sampling_params=SamplingParams(
                    max_tokens=output,
                    ignore_eos=True,
                    detokenize=False,
                    output_kind=RequestOutputKind.FINAL_ONLY,
                    **self.asks,
                ),
                pooling_params=None,
                arrival_time=0.0,
                lora_request=None,
                cache_salt=None,
                data_parallel_rank=None,
            )
            self.num_requests += 1
            self.processor.add_request(request, None)
            self.scheduler.add_request(Request.from_engine_core_request(request, hasher))

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

    def measured_step(self) -> list[float]:
        """Milliseconds of a step, by part."""
        self.spent = dict.fromkeys(PARTS, 0.0)
        self.step()
        return [1e3 * spent for spent in self.spent.values()]

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
        for message in outputs.values():
            received = self.timed("to the front end", partial(self.transmit, message))
            self.timed("front end", partial(self.process, received))

    def transmit(self, message: Any) -> Any:
        self.send_frames(self.sender, self.encoder.encode(message))
        return self.decoder.decode(self.receiver.recv_multipart(copy=False))

    def process(self, message: Any) -> None:
        # In the release they come with each output.
        if hasattr(message, "distribute_routed_experts"):
            message.distribute_routed_experts()
        for start in range(0, len(message.outputs), 128):  # as AsyncLLM does
            self.processor.process_outputs(message.outputs[start : start + 128])

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
        engine.add(requests, prompt, 1000)
        for _ in range(3):
            engine.step()
    gc.collect()
    gc.disable()
    found: dict[str, list[list[float]]] = {name: [] for name in engines}
    for _ in range(steps):
        for name, engine in engines.items():
            found[name].append(engine.measured_step())
    return found


def measure_groups(build: str, size: int, prompt: int, groups: int) -> dict[str, Any]:
    """Milliseconds of the first and the last step of each group by engine, and by part."""
    engines = {
        name: Engine(size, prompt, flag, asks, group=True)
        for name, (flag, asks) in ENGINES[build].items()
    }
    found: dict[str, Any] = {name: {"prompt": [], "end": []} for name in engines}
    gc.disable()
    for _ in range(groups):
        for name, engine in engines.items():
            engine.add(size, prompt, GROUP_OUTPUT, group=True)
            found[name]["prompt"].append(engine.measured_step())
            for _ in range(GROUP_OUTPUT - 2):
                engine.step()
            found[name]["end"].append(engine.measured_step())
            assert not engine.scheduler.requests
            gc.collect()
    return found


def measure_memory(build: str, name: str, size: int, prompt: int) -> float:
    """Megabytes that the first group takes at the peak of its first step."""
    engine = Engine(size, prompt, *ENGINES[build][name], group=True)
    engine.add(size, prompt, GROUP_OUTPUT, group=True)
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the peak is what there is now
    before = read_peak()
    engine.step()
    return (read_peak() - before) / 1e6


def read_peak() -> int:
    """The most bytes of memory that this process has had."""
    match = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert match is not None
    return int(match[1]) * 1024


def average(steps: np.ndarray) -> np.ndarray:
    """The mean over a block's steps, each the median of its repetitions. Takes (steps, ...)."""
    rounds = steps.reshape(-1, BLOCK, *steps.shape[1:])
    return np.median(rounds, axis=0).mean(axis=0)


def run_build(build: str, arguments: list[str]) -> Any:
    """What a new process with the build found."""
    place = str(PRISTINE) if build == "release" else os.environ.get("PYTHONPATH", "")
    path = os.pathsep.join([place, str(ROOT)])
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.host_v0_33_0", "--build", build, *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


def more_rows(times: dict[tuple[str, str], Any], reduce: Callable[[np.ndarray], Any]) -> list[Any]:
    """Rows of a table: the time of a build without the flag, and what the others take more."""
    rows = []
    for (build, name), steps in times.items():
        values = np.array(steps)
        is_base = name == "flag off"
        if not is_base:
            values = values - np.array(times[build, "flag off"])
        cells = [*reduce(values), reduce(values.sum(axis=1))]
        rows.append(
            [f"{build}, {name}", *(f"{cell:.2f}" if is_base else f"{cell:+.2f}" for cell in cells)]
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=1024)
    parser.add_argument("--prompt", type=int, default=64, help="tokens of each prompt of a decode")
    parser.add_argument("--blocks", type=int, default=4, help="of 16 decode steps, in each process")
    parser.add_argument("--groups", type=int, nargs="*", default=[64, 256], help="their sizes")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--layers", type=int, default=LAYERS)
    parser.add_argument("--out", type=Path, help="Markdown file to write")
    parser.add_argument("--build", choices=ENGINES, help=argparse.SUPPRESS)
    parser.add_argument("--group", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--memory", help=argparse.SUPPRESS)
    args = parser.parse_args()
    globals()["LAYERS"] = args.layers
    if args.build:
        if args.memory:
            found: Any = measure_memory(args.build, args.memory, args.group, GROUP_PROMPT)
        elif args.group:
            found = measure_groups(args.build, args.group, GROUP_PROMPT, groups=3)
        else:
            found = measure(args.build, args.requests, args.prompt, args.blocks * BLOCK)
        print(json.dumps(found))
        return
    if not PRISTINE.is_dir():
        sys.exit(f"error: no release in {PRISTINE}: run make demo-pristine ON=v0.33.0")
    decodes: dict[tuple[str, str], Any] = {}
    groups: dict[tuple[int, str], dict[tuple[str, str], Any]] = {}
    layers = ["--layers", str(args.layers)]
    for _ in range(args.rounds):
        for build in ENGINES:
            names = ("requests", "prompt", "blocks") if args.requests else ()
            arguments = [text for name in names for text in (f"--{name}", str(getattr(args, name)))]
            for name, steps in (run_build(build, layers + arguments) if names else {}).items():
                decodes.setdefault((build, name), []).extend(steps)
            for size in args.groups:
                group = run_build(build, [*layers, "--group", str(size)])
                for name, found in group.items():
                    for step, values in found.items():
                        times = groups.setdefault((size, step), {})
                        times.setdefault((build, name), []).extend(values)
    memory = [
        [
            f"{build}, {name}",
            *(
                f"{run_build(build, [*layers, '--group', str(size), '--memory', name]):.1f}"
                for size in args.groups
            ),
        ]
        for build, names in ENGINES.items()
        for name in names
    ]
    cpu = platform.processor() or platform.machine()
    head = ["", *PARTS, "**all**"]
    lines = [
        "# Host time and memory of rows on the line v0.33.0",
        "",
        f"{args.layers} layers, top-{TOP_K}. {cpu}, {os.cpu_count()} cores, "
        f"load {os.getloadavg()[1]:.0f}. Milliseconds of processor time. The first row of a build "
        "is the time, the others are what they take more.",
        "",
    ]
    if decodes:
        lines += [
            f"## A decode step of {args.requests} requests",
            "",
            f"{args.rounds} processes of {args.blocks * BLOCK} steps for each build.",
            "",
            table(head, more_rows(decodes, average)),
            "",
        ]
    for (size, step), times in groups.items():
        where = "The step of the prompt" if step == "prompt" else "The step in which all end"
        lines += [
            f"## {where}, {size} requests with one prompt of {GROUP_PROMPT:,}",
            "",
            f"The median of {3 * args.rounds} groups.",
            "",
            table(head, more_rows(times, lambda values: np.median(values, axis=0))),
            "",
        ]
    if args.groups:
        sizes = [f"{size} requests" for size in args.groups]
        lines += [
            "## Megabytes that the step of the prompt takes at the peak",
            "",
            table(["", *sizes], memory),
        ]
    text = "\n".join(lines)
    print(text)
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(text)


if __name__ == "__main__":
    main()
