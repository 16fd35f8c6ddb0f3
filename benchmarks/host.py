# SPDX-License-Identifier: Apache-2.0
"""Measures what rows cost the host per step: in the scheduler, and on the way to the front end.

    python -m benchmarks.host --out benchmarks/results/host-cpu.md

It needs no GPU. vLLM's own scheduler, message encoding, socket and output processor run with
generated tokens and random rows in the shape of DeepSeek-V3: 61 layers, top-8, one byte per id. Two
engines take turns, step by step. In one every request is silent, in the other all ask, so the
difference is what rows cost. As in vLLM, each front end is a separate process that receives
messages through a socket. Two loads: 1,024 running requests that decode, and 64 requests of 4,000
tokens that finish in one step. Milliseconds are processor time of the thread, so that a busy
machine matters little.
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import platform
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
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
from vllm.v1.outputs import ModelRunnerOutput, RoutedExpertsLists
from vllm.v1.request import Request
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder
from vllm.v1.structured_output import StructuredOutputManager

from benchmarks.common import command, table

LAYERS, TOP_K, EXPERTS = 61, 8, 256
BLOCK = 16
PARTS = ("schedule", "update", "encode", "send", "receive", "decode", "process")
WAYS = {"scheduler": PARTS[:2], "to the front end": PARTS[2:]}


@dataclass(frozen=True)
class Load:
    """Requests that all start, and finish, together."""

    name: str
    requests: int
    prompt: int
    output: int
    batch: int = 16_384

    def __str__(self) -> str:
        return f"{self.requests:,} requests of {self.prompt:,} in, {self.output:,} out"


LOADS = (
    Load("decode", requests=1024, prompt=64, output=256),
    Load("finish at once", requests=64, prompt=3_000, output=1_000),
)


def make_scheduler(load: Load) -> Scheduler:
    max_len = load.prompt + load.output
    num_blocks = load.requests * (max_len // BLOCK + 2)
    config = VllmConfig(device_config=DeviceConfig("cpu"))
    # No checkpoint: the scheduler reads only a few attributes of the model.
    config.model_config = MagicMock()
    config.model_config.skip_tokenizer_init = True
    config.model_config.is_multimodal_model = False
    config.model_config.is_encoder_decoder = False
    config.model_config.max_model_len = max_len
    config.model_config.enable_return_routed_experts = True
    config.cache_config = MagicMock()
    config.cache_config.num_gpu_blocks = num_blocks
    config.cache_config.enable_prefix_caching = True
    config.scheduler_config.max_num_seqs = load.requests
    config.scheduler_config.max_num_batched_tokens = load.batch
    config.scheduler_config.max_num_scheduled_tokens = load.batch
    config.scheduler_config.async_scheduling = False
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=1, dtype=torch.float32)
    return Scheduler(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(num_blocks, [], [KVCacheGroupSpec(["layer"], spec)]),
        structured_output_manager=StructuredOutputManager(config),
        block_size=BLOCK,
        log_stats=False,
    )


def make_requests(load: Load, asks: bool) -> Iterator[EngineCoreRequest]:
    rng = np.random.default_rng(int(asks))
    for index in range(load.requests):
        yield EngineCoreRequest(
            request_id=str(index),
            external_req_id=str(index),
            prompt_token_ids=rng.integers(0, 1000, load.prompt).tolist(),
            mm_features=None,
            sampling_params=SamplingParams(
                max_tokens=load.output,
                ignore_eos=True,
                detokenize=False,
                # As the input processor sets them.
                return_routed_experts=True if asks else None,
                routed_experts_prompt_start=0 if asks else None,
                output_kind=RequestOutputKind.FINAL_ONLY,
            ),
            pooling_params=None,
            arrival_time=0.0,
            lora_request=None,
            cache_salt=None,
            data_parallel_rank=None,
        )


def front_end(load: Load, asks: bool, address: str, parent: Connection) -> None:
    """Read an engine's messages until all requests have finished. Sends the seconds of each part to
    the parent after each message."""
    processor = OutputProcessor(tokenizer=None, log_stats=False)
    for request in make_requests(load, asks):
        processor.add_request(request, None)
    decoder = MsgpackDecoder(EngineCoreOutputs)
    socket = zmq.Context.instance().socket(zmq.PULL)
    socket.connect(address)
    clock = time.thread_time
    parent.send({})
    gc.disable()
    finished = 0
    while finished < load.requests:
        socket.poll()
        begin = clock()
        frames = socket.recv_multipart(copy=False)
        received = clock()
        message: EngineCoreOutputs = decoder.decode(frames)
        decoded = clock()
        processor.add_routed_experts(message)
        outputs = processor.process_outputs(message.outputs)
        processed = clock()
        for output in outputs.request_outputs:
            rows = output.outputs[0].routed_experts
            expected = load.prompt + load.output - 1 if asks else None
            assert (None if rows is None else len(rows)) == expected
            finished += 1
        parent.send(
            {
                "receive": received - begin,
                "decode": decoded - received,
                "process": processed - decoded,
            }
        )


@dataclass
class Engine:
    """Scheduler and socket with a stub of the worker, and its front end."""

    load: Load
    asks: bool
    pool: np.ndarray
    folder: Path
    steps: list[dict[str, float]] = field(default_factory=list)

    def __post_init__(self) -> None:
        address = f"ipc://{self.folder}/{'asking' if self.asks else 'silent'}"
        self.socket = zmq.Context.instance().socket(zmq.PUSH)
        self.socket.bind(address)
        spawn = multiprocessing.get_context("spawn")
        self.front_end, end = spawn.Pipe()
        self.process = spawn.Process(
            target=front_end, args=(self.load, self.asks, address, end), daemon=True
        )
        self.process.start()
        end.close()
        self.scheduler = make_scheduler(self.load)
        self.encoder = MsgpackEncoder()
        hasher = get_request_block_hasher(BLOCK, sha256_cbor)
        for request in make_requests(self.load, self.asks):
            self.scheduler.add_request(Request.from_engine_core_request(request, hasher))
        self.front_end.recv()

    def work(self, scheduled: SchedulerOutput) -> ModelRunnerOutput:
        """What the model runner returns. Not timed."""
        req_ids = list(scheduled.num_scheduled_tokens)
        num_rows = list(scheduled.num_scheduled_tokens.values())
        requests = [self.scheduler.requests[req_id] for req_id in req_ids]
        ends = [r.num_computed_tokens for r in requests]
        output = ModelRunnerOutput(
            req_ids=req_ids,
            req_id_to_index={req_id: i for i, req_id in enumerate(req_ids)},
            sampled_token_ids=[
                [7] if end >= r.num_tokens else [] for r, end in zip(requests, ends, strict=True)
            ],
        )
        # The worker's memory is new in every step. Both engines allocate it, so that they use the
        # processor's cache alike.
        rows = self.pool[: sum(num_rows)].copy()
        if self.asks:
            output.routed_experts = RoutedExpertsLists(
                req_ids=req_ids,
                num_rows=np.array(num_rows),
                positions=np.array(ends) - num_rows,
                rows=rows,
                moe_layers=tuple(range(LAYERS)),
            )
        return output

    def step(self) -> bool:
        """Run one step and record its milliseconds by part. Returns whether there was a step."""
        clock = time.thread_time
        marks = [clock()]
        scheduled = self.scheduler.schedule()
        if not scheduled.total_num_scheduled_tokens:
            return False
        marks.append(clock())
        result = self.work(scheduled)
        begin = clock()
        outputs = self.scheduler.update_from_output(scheduled, result)
        took = {"schedule": marks[1] - marks[0], "update": clock() - begin}
        del result
        begin = clock()
        frames = self.encoder.encode(outputs.get(0) or EngineCoreOutputs())
        encoded = clock()
        self.socket.send_multipart(frames, copy=False)
        took |= {"encode": encoded - begin, "send": clock() - encoded}
        took |= self.front_end.recv()
        self.steps.append({part: 1e3 * seconds for part, seconds in took.items()})
        return True


def measure(load: Load, seed: int) -> dict[str, Engine]:
    pool = np.random.default_rng(seed).integers(0, EXPERTS, (load.batch, LAYERS, TOP_K), np.uint8)
    with tempfile.TemporaryDirectory() as folder:
        engines = {
            name: Engine(load, name == "asking", pool, Path(folder))
            for name in ("silent", "asking")
        }
        gc.collect()
        gc.disable()
        going = True
        while going:
            # The order alternates, so that a slow moment affects both.
            order = list(engines.values())[:: 1 if len(engines["silent"].steps) % 2 else -1]
            stepped = [engine.step() for engine in order]
            going = all(stepped)
        gc.enable()
    for engine in engines.values():
        # It ends when all requests have finished with their rows.
        engine.process.join(60)
        assert engine.process.exitcode == 0
        engine.socket.close(0)
    return engines


def summarize(load: Load, engines: dict[str, Engine]) -> dict[str, Any]:
    """Milliseconds per decode step, by part and by group of parts: of both engines, and the
    difference at the same step; also those of the last step, which finishes all requests."""
    labels = {**{part: (part,) for part in PARTS}, **WAYS}
    record: dict[str, Any] = {"load": str(load)}
    for label, parts in labels.items():
        silent, asking = (
            np.array([sum(step[part] for part in parts) for step in engines[name].steps])
            for name in ("silent", "asking")
        )
        decode = slice(-load.output + 2, -1)
        more = (asking - silent)[decode]
        record[label] = {
            "silent": float(np.median(silent[decode])),
            "asking": float(np.median(asking[decode])),
            "more": float(np.median(more)),
            "more_mean": float(np.mean(more)),
            "p99": [float(np.percentile(ms[decode], 99)) for ms in (silent, asking)],
            "last": [float(ms[-1]) for ms in (silent, asking)],
        }
    return record


def report_text(records: list[dict[str, Any]]) -> str:
    head = ["Part", "Silent", "Asking", "Rows cost", "On average", "99th percentile"]
    parts = []
    for record in records:
        rows = []
        for label in (*PARTS, *WAYS):
            row = record[label]
            strong = "**" if label in WAYS else ""
            rows.append(
                [
                    f"{strong}{label}{strong}",
                    f"{row['silent']:.2f}",
                    f"{row['asking']:.2f}",
                    f"{strong}{row['more']:+.2f}{strong}",
                    f"{row['more_mean']:+.2f}",
                    *("{:.2f}, {:.2f}".format(*row[key]) for key in ("p99", "last")),
                ]
            )
        parts += [f"## {record['load']}\n", table([*head, "The last step"], rows)]
    return "\n".join(parts)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="file for the record, as Markdown; JSON beside it")
    arguments = parser.parse_args()
    init_none_hash(sha256_cbor)
    records = []
    for number, load in enumerate(LOADS):
        print(load, flush=True)
        records.append(summarize(load, measure(load, number)))
    text = report_text(records)
    print(text)
    if arguments.out:
        arguments.out.write_text(
            "# What rows cost the host\n\n"
            f"`python {' '.join(command())}`: {LAYERS} layers, top-{TOP_K}, "
            f"uint8; vllm {vllm.__version__}, Python {platform.python_version()}. Milliseconds a "
            "step, the median over the decode steps; what rows cost is the difference of the two "
            "engines at the same step, its median and its average (in some steps all requests fill "
            "a block); two values are silent, asking.\n\n" + text
        )
        arguments.out.with_suffix(".json").write_text(json.dumps(records, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
