# SPDX-License-Identifier: Apache-2.0
"""An engine without a model, for `host.py`: vLLM's scheduler, messages, socket and front end."""

from __future__ import annotations

import contextlib
import gc
import json
import multiprocessing
import re
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Self
from unittest.mock import MagicMock

import numpy as np
import torch
import vllm
import zmq
from vllm.config import DeviceConfig, VllmConfig
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.utils.hashing import sha256_cbor
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutputs, EngineCoreRequest
from vllm.v1.engine.output_processor import OutputProcessor
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder
from vllm.v1.structured_output import StructuredOutputManager

from benchmarks.builds import Process, Variant
from benchmarks.engine import Engine as Worker

LAYERS, TOP_K, EXPERTS = 61, 8, 256
BLOCK = 16
PARTS = ("schedule", "update", "encode", "send", "receive", "decode", "process")
WAYS = {"scheduler": PARTS[:2], "to the front end": PARTS[2:]}
# The server that other processes are forked from imports vLLM once for all of them.
PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["benchmarks.host_engine"])


@dataclass(frozen=True)
class Load:
    """Requests that are all there at the start.

    Attributes:
        name: what reports call it.
        requests: how many.
        prompt: tokens of each prompt.
        output: tokens that each request returns.
        at_once: how many run at once, all if 0.
        group: how many consecutive requests share a prompt.
        drafts: tokens that are drafted for each request and step; any number is accepted.
        batch: the most tokens in a step.
        front_end: whether there is a front end.
    """

    name: str
    requests: int
    prompt: int
    output: int
    at_once: int = 0
    group: int = 1
    drafts: int = 0
    batch: int = 16_384
    front_end: bool = True

    def __str__(self) -> str:
        text = f"{self.running:,} requests of {self.prompt:,} in, {self.output:,} out"
        if self.drafts:
            text += f", {self.drafts} drafts each"
        return text + (", with one prompt" if self.group > 1 else "")

    @property
    def running(self) -> int:
        """How many requests run at once."""
        return self.at_once or self.requests

    @property
    def num_blocks(self) -> int:
        """Blocks of KV: the requests that run, and as many that have finished."""
        own = self.output if self.group > 1 else self.prompt + self.output
        shared = self.running // self.group * self.prompt if self.group > 1 else 0
        running = self.running * ((own + self.drafts) // BLOCK + 3) + shared // BLOCK
        return running if self.running == self.requests else 2 * running

    def is_decode(self, requests: int, tokens: int) -> bool:
        """Whether a step with so many requests and tokens decodes for all that can run."""
        return requests == self.running and tokens == requests * (1 + self.drafts)

    def asks(self, kind: str, index: int) -> bool:
        """Whether the request asks for rows."""
        return kind == "all" or (kind == "one" and index == self.requests // 2)


def make_scheduler(load: Load, kind: str) -> Scheduler:
    config = VllmConfig(device_config=DeviceConfig("cpu"))
    # No checkpoint: the scheduler reads only a few attributes of the model.
    config.model_config = MagicMock()
    config.model_config.skip_tokenizer_init = True
    config.model_config.is_multimodal_model = False
    config.model_config.is_encoder_decoder = False
    config.model_config.max_model_len = load.prompt + load.output
    config.model_config.enable_return_routed_experts = kind != "off"
    config.cache_config = MagicMock()
    config.cache_config.num_gpu_blocks = load.num_blocks
    config.cache_config.enable_prefix_caching = True
    config.scheduler_config.max_num_seqs = load.running
    config.scheduler_config.max_num_batched_tokens = load.batch
    config.scheduler_config.max_num_scheduled_tokens = load.batch
    config.scheduler_config.async_scheduling = False
    if load.drafts:
        config.speculative_config = MagicMock()
        config.speculative_config.num_speculative_tokens = load.drafts
        config.speculative_config.use_eagle.return_value = False
        config.speculative_config.uses_draft_model.return_value = False
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=1, dtype=torch.float32)
    scheduler = Scheduler(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(load.num_blocks, [], [KVCacheGroupSpec(["layer"], spec)]),
        structured_output_manager=StructuredOutputManager(config),
        block_size=BLOCK,
        log_stats=False,
    )
    # vLLM without the series has none.
    if (routed_experts := getattr(scheduler, "routed_experts", None)) is not None:
        routed_experts.rows.reserve(LAYERS, TOP_K, "uint8")
    return scheduler


def make_requests(load: Load, kind: str) -> Iterator[EngineCoreRequest]:
    rng = np.random.default_rng(0)
    for index in range(load.requests):
        if index % load.group == 0:
            prompt = rng.integers(0, 1000, load.prompt).tolist()
        # As the input processor sets them.
        ask = {"return_routed_experts": True, "routed_experts_prompt_start": 0}
        yield EngineCoreRequest(
            request_id=str(index),
            external_req_id=str(index),
            prompt_token_ids=prompt,
            mm_features=None,
            sampling_params=SamplingParams(
                max_tokens=load.output,
                ignore_eos=True,
                detokenize=False,
                output_kind=RequestOutputKind.FINAL_ONLY,
                **(ask if load.asks(kind, index) else {}),
            ),
            pooling_params=None,
            arrival_time=0.0,
            lora_request=None,
            cache_salt=None,
            data_parallel_rank=None,
        )


def front_end(load: Load, kind: str, address: str, parent: Connection) -> None:
    """Read an engine's messages until all requests have finished. Sends the seconds of each part to
    the parent after each message."""
    processor = OutputProcessor(tokenizer=None, log_stats=False)
    for request in make_requests(load, kind):
        processor.add_request(request, None)
    # vLLM without the series has none.
    add_routed_experts = getattr(processor, "add_routed_experts", lambda message: False)
    decoder = MsgpackDecoder(EngineCoreOutputs)
    messages = zmq.Context.instance().socket(zmq.PULL)
    messages.connect(address)
    clock = time.thread_time
    parent.send({})
    gc.disable()
    finished = 0
    while finished < load.requests:
        messages.poll()
        begin = clock()
        frames = messages.recv_multipart(copy=False)
        received = clock()
        message: EngineCoreOutputs = decoder.decode(frames)
        del frames
        decoded = clock()
        add_routed_experts(message)
        outputs = processor.process_outputs(message.outputs)
        processed = clock()
        for output in outputs.request_outputs:
            rows = output.outputs[0].routed_experts
            asks = load.asks(kind, int(output.request_id))
            expected = load.prompt + load.output - 1 if asks else None
            assert (None if rows is None else len(rows)) == expected
            finished += 1
        del outputs
        parent.send(
            {
                "receive": received - begin,
                "decode": decoded - received,
                "process": processed - decoded,
            }
        )


class Core:
    """A scheduler and the encoding of its messages, with a stub of the worker."""

    def __init__(self, load: Load, kind: str) -> None:
        init_none_hash(sha256_cbor)
        self.load, self.kind = load, kind
        rng = np.random.default_rng(1)
        self.pool = rng.integers(0, EXPERTS, (load.batch, LAYERS, TOP_K), np.uint8)
        self.scheduler = make_scheduler(load, kind)
        self.encoder = MsgpackEncoder()
        self.num_steps = 0
        hasher = get_request_block_hasher(BLOCK, sha256_cbor)
        for request in make_requests(load, kind):
            self.scheduler.add_request(Request.from_engine_core_request(request, hasher))

    def work(self, scheduled: SchedulerOutput) -> ModelRunnerOutput:
        """What the model runner returns. Not timed."""
        req_ids = list(scheduled.num_scheduled_tokens)
        num_rows = np.array([*scheduled.num_scheduled_tokens.values()])
        requests = [self.scheduler.requests[req_id] for req_id in req_ids]
        ends = np.array([r.num_computed_tokens for r in requests])
        drafts = scheduled.scheduled_spec_decode_tokens
        share = np.random.default_rng(self.num_steps).random(len(req_ids))
        num_drafts = np.array([len(drafts.get(req_id, ())) for req_id in req_ids])
        accepted = (share * (num_drafts + 1)).astype(int)
        output = ModelRunnerOutput(
            req_ids=req_ids,
            req_id_to_index={req_id: i for i, req_id in enumerate(req_ids)},
            sampled_token_ids=[
                [7] * (1 + count) if end >= r.num_tokens else []
                for r, end, count in zip(requests, ends, accepted.tolist(), strict=True)
            ],
        )
        # The worker's memory is new in every step. Engines of all kinds allocate it, so that they
        # use the processor's cache alike.
        rows = self.pool[: num_rows.sum()].copy()
        asking = [i for i, r in enumerate(req_ids) if self.load.asks(self.kind, int(r))]
        if asking:
            from vllm.v1.outputs import RoutedExpertsLists

            output.routed_experts = RoutedExpertsLists(
                req_ids=[req_ids[i] for i in asking],
                num_rows=num_rows[asking],
                positions=(ends - num_rows)[asking],
                rows=rows[: num_rows[asking].sum()],
                moe_layers=tuple(range(LAYERS)),
            )
        return output

    def step(self) -> tuple[dict[str, float], Any] | None:
        """Run one step.

        Returns:
            The seconds of each part, with the numbers of requests and tokens, and the frames of the
            message; None if there was nothing to do.
        """
        clock = time.thread_time
        begin = clock()
        scheduled = self.scheduler.schedule()
        took = {"schedule": clock() - begin}
        if not scheduled.total_num_scheduled_tokens:
            return None
        result = self.work(scheduled)
        begin = clock()
        outputs = self.scheduler.update_from_output(scheduled, result)
        took["update"] = clock() - begin
        del result
        self.num_steps += 1
        if self.load.drafts:
            req_ids = list(scheduled.num_scheduled_tokens)
            tokens = [[7] * self.load.drafts for _ in req_ids]
            self.scheduler.update_draft_token_ids(DraftTokenIds(req_ids, tokens))
        begin = clock()
        frames = self.encoder.encode(outputs.get(0) or EngineCoreOutputs())
        took["encode"] = clock() - begin
        took["requests"] = len(scheduled.num_scheduled_tokens)
        took["tokens"] = scheduled.total_num_scheduled_tokens
        return took, frames


def read_peak() -> int:
    """The most bytes of memory that this process has had."""
    match = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert match is not None
    return int(match[1]) * 1024


def peak_memory(load: Load, kind: str, parent: Connection) -> None:
    """Run the load without a front end, and send the parent the most bytes that scheduler and
    messages have taken. A message is kept until there is the next one."""
    core = Core(load, kind)
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the peak is what there is now
    before = read_peak()
    stepped = core.step()
    while stepped is not None:
        stepped = core.step()
    parent.send(read_peak() - before)


class Engine:
    """A scheduler, and its front end in a process of its own."""

    def __init__(self, load: Load, kind: str) -> None:
        self.load, self.kind = load, kind
        self.steps: list[dict[str, float]] = []

    def __enter__(self) -> Self:
        self._process = None
        if self.load.front_end:
            self._folder = tempfile.TemporaryDirectory()
            self._socket = zmq.Context.instance().socket(zmq.PUSH)
            self._socket.bind(address := f"ipc://{self._folder.name}/socket")
            self._front_end, end = PROCESSES.Pipe()
            self._process = PROCESSES.Process(
                target=front_end, args=(self.load, self.kind, address, end), daemon=True
            )
            self._process.start()
            end.close()
        self._core = Core(self.load, self.kind)
        if self._process is not None:
            self._front_end.recv()
        return self

    def step(self) -> bool:
        """Run one step and record its milliseconds by part. Returns whether there was a step."""
        if (stepped := self._core.step()) is None:
            return False
        took, frames = stepped
        if self._process is not None:
            begin = time.thread_time()
            self._socket.send_multipart(frames, copy=False)
            took["send"] = time.thread_time() - begin
            took |= self._front_end.recv()
        self.steps.append({k: 1e3 * v if k in PARTS else v for k, v in took.items()})
        return True

    def __exit__(self, *error: object) -> None:
        if self._process is None:
            return
        if error == (None, None, None):
            # It ends when all requests have finished with their rows.
            self._process.join(60)
            assert self._process.exitcode == 0
        self._process.kill()
        self._socket.close(0)
        self._folder.cleanup()


class RemoteEngine:
    """An engine in a process of another build, as another start of it may be."""

    def __init__(self, variant: Variant, load: Load) -> None:
        self.steps: list[dict[str, float]] = []
        self._variant, self._load = variant, load

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            listener = stack.enter_context(socket.socket(socket.AF_UNIX))
            listener.bind(str(folder / "engine"))
            listener.listen(1)
            listener.settimeout(1.0)
            code = "from benchmarks.host_engine import serve; serve()"
            arguments = [str(folder / "engine"), json.dumps(asdict(self._load))]
            process = Process(self._variant.build, ["-c", code, *arguments], folder / "log")
            stack.enter_context(process)
            self._remote = Worker(self._variant, process, listener)
            self.version: str = self._remote.hear(600)["version"]
            self._stack = stack.pop_all()
        return self

    def step(self) -> bool:
        """As of `Engine`."""
        if took := self._remote.ask("step", 600):
            self.steps.append(took)
        return bool(took)

    def __exit__(self, *error: object) -> None:
        self._stack.close()


def serve() -> None:
    """Run an engine with the flag off, step by step, for a `RemoteEngine`."""
    path, load = sys.argv[1], Load(**json.loads(sys.argv[2]))
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(path)
    with connection.makefile("rw", encoding="utf-8") as lines, Engine(load, "off") as engine:
        gc.disable()
        lines.write(json.dumps({"version": vllm.__version__}) + "\n")
        lines.flush()
        for _ in lines:
            lines.write(json.dumps(engine.steps[-1] if engine.step() else {}) + "\n")
            lines.flush()
