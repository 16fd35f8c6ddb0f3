# SPDX-License-Identifier: Apache-2.0
"""An engine without a model: vLLM's scheduler, the worker's side of rows, messages, front end."""

from __future__ import annotations

import mmap
import os
import pickle
import time
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import zmq
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.engine.core import EngineCoreProc
from vllm.v1.engine.output_processor import OutputProcessor
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from benchmarks.host import BLOCK, EXPERTS, PARTS, TOP_K
from harness import scheduling


class Engine:
    """One engine. `layers` are of a row, `requests` the most that run at once. `who` asks:
    "nobody", "one" or "all"; empty if requests do not say it. In a `group`, requests share a
    prompt."""

    def __init__(
        self, layers: int, requests: int, prompt: int, flag: bool, who: str, group: bool = False
    ) -> None:
        init_none_hash(sha256)
        own = 24 if group else prompt // BLOCK + 24
        num_blocks = requests * own + (2 * prompt // BLOCK if group else 0) + 1
        batch = 16_384 if group else requests * prompt
        config = scheduling.make_config(
            num_blocks=num_blocks,
            block_size=BLOCK,
            max_model_len=prompt + 1024,
            max_num_seqs=requests,
            batch=batch,
            flag=flag,
        )
        kv_cache = scheduling.full_attention(num_blocks, BLOCK)
        self.scheduler: Any = scheduling.make_scheduler(config, kv_cache)
        self.who = who
        self.requests = requests
        self.num_added = 0
        self.rng = np.random.default_rng(0)
        self.rows = self.rng.integers(EXPERTS, size=(batch, layers, TOP_K), dtype=np.uint8)
        self.spent = dict.fromkeys(PARTS, 0.0)
        self.worker: Any = None
        if flag and hasattr(config, "aux_output_config"):
            self.worker = Connector(config, kv_cache, (layers, TOP_K), self.snapshot)
        elif flag:
            self.scheduler.routed_experts.rows.reserve(layers, TOP_K, "uint8")
            self.worker = Capturer(layers, batch, self.snapshot)
        self.encoder, self.decoder = MsgpackEncoder(), MsgpackDecoder(EngineCoreOutputs)
        context = zmq.Context()
        self.sender, self.receiver = context.socket(zmq.PUSH), context.socket(zmq.PULL)
        for socket in (self.sender, self.receiver):
            socket.set_hwm(0)
        path = f"ipc://@vllm-host-{os.getpid()}-{id(self)}"  # an abstract socket, without a file
        self.receiver.bind(path)
        self.sender.connect(path)
        # v0.33.0 keeps the memory of a message until it has been sent.
        send = getattr(EngineCoreProc, "_send_msg_tracking_payload", None)
        self.send_frames = send or (
            lambda sender, frames: sender.send_multipart(frames, copy=False)
        )
        self.processor: Any = OutputProcessor(tokenizer=None, log_stats=False)

    def add(self, prompt: int, output: int, group: bool = False) -> None:
        """Add requests, in a group all with one prompt."""
        hasher = get_request_block_hasher(BLOCK, sha256)
        for index in range(self.requests):
            if index == 0 or not group:
                tokens = self.rng.integers(50_000, size=prompt).tolist()
            asks = {"all": True, "one": index == self.requests // 2}.get(self.who, False)
            fields: dict[str, Any] = {"return_routed_experts": asks} if self.who else {}
            if asks and isinstance(self.worker, Capturer):  # as the input processor does
                fields["routed_experts_prompt_start"] = 0
            sampling = SamplingParams(
                max_tokens=output,
                ignore_eos=True,
                detokenize=False,
                output_kind=RequestOutputKind.FINAL_ONLY,
                **fields,
            )
            request = scheduling.make_request(f"request-{self.num_added}", tokens, sampling)
            self.num_added += 1
            self.processor.add_request(request, None)
            self.scheduler.add_request(Request.from_engine_core_request(request, hasher))
            if isinstance(self.worker, Capturer):
                self.worker.add(request)

    def snapshot(self, count: Any, rows: np.ndarray | None = None) -> torch.Tensor:
        """Rows in memory that is new in each step, as the copy from the GPU is. That copy takes no
        time of the host."""
        start = time.process_time()
        chosen = slice(count if isinstance(count, int) else len(count)) if rows is None else rows
        taken = self.rows[chosen].copy()
        self.spent["worker"] -= time.process_time() - start
        return torch.from_numpy(taken)

    def measured_step(self) -> list[float]:
        """Milliseconds of a step, by part."""
        self.spent.update(dict.fromkeys(PARTS, 0.0))
        self.step()
        return [1e3 * spent for spent in self.spent.values()]

    def timed(self, part: str, call: Callable[[], Any]) -> Any:
        start = time.process_time()
        result = call()
        self.spent[part] += time.process_time() - start
        return result

    def step(self) -> None:
        scheduled = self.timed("scheduler", self.scheduler.schedule)
        sent = self.timed("scheduler to worker", lambda: send(scheduled))
        output = self.run(sent)
        output = self.timed("worker to scheduler", lambda: send(output))
        update = partial(self.scheduler.update_from_output, scheduled, output)
        for message in self.timed("scheduler", update).values():
            received = self.timed("to the front end", partial(self.transmit, message))
            self.timed("front end", partial(self.process, received))

    def run(self, scheduled: Any) -> ModelRunnerOutput:
        """What the model runner does: one token for each request."""
        req_ids = list(scheduled.num_scheduled_tokens)
        output = ModelRunnerOutput(
            req_ids=req_ids,
            req_id_to_index={req_id: i for i, req_id in enumerate(req_ids)},
            sampled_token_ids=[[7]] * len(req_ids),
        )
        if self.worker is not None:
            counts = list(scheduled.num_scheduled_tokens.values())
            starts = {new.req_id: new.num_computed_tokens for new in scheduled.scheduled_new_reqs}
            cached = scheduled.scheduled_cached_reqs
            starts.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
            batch = SimpleNamespace(
                req_ids=req_ids,
                req_id_to_index=output.req_id_to_index,
                query_start_loc_np=np.cumsum([0, *counts]),
                num_computed_tokens_np=np.array([starts[r] for r in req_ids], np.int32),
            )
            self.timed("worker", lambda: self.worker.take_rows(scheduled, batch, output))
        return output

    def transmit(self, message: Any) -> Any:
        self.send_frames(self.sender, self.encoder.encode(message))
        return self.decoder.decode(self.receiver.recv_multipart(copy=False))

    def process(self, message: Any) -> None:
        # v0.20.2's way, then v0.33.0's. In the releases rows come with each output.
        if hasattr(self.processor, "add_routed_experts"):
            self.processor.add_routed_experts(message)
        if hasattr(message, "distribute_routed_experts"):
            message.distribute_routed_experts()
        for start in range(0, len(message.outputs), 128):  # as AsyncLLM does
            self.processor.process_outputs(message.outputs[start : start + 128])


class Capturer:
    """The worker's side on v0.20.2."""

    def __init__(self, layers: int, batch: int, snapshot: Callable[..., torch.Tensor]) -> None:
        from vllm.model_executor.layers.fused_moe import (
            routed_experts_capture,
            routed_experts_pipeline,
        )

        # The only pipeline stage.
        stage: Any = SimpleNamespace(is_first_rank=True)
        routed_experts_pipeline.get_pp_group = lambda: stage
        self._capturer: Any = routed_experts_capture.RoutedExpertsCapturer(
            layers, 128, TOP_K, EXPERTS, tuple(range(layers)), torch.device("cpu")
        )
        self._capturer.snapshot = snapshot

    def add(self, request: Any) -> None:
        self._capturer.add_request(request.request_id, request.sampling_params)

    def take_rows(self, scheduled: Any, batch: Any, output: Any) -> None:
        for req_id in scheduled.finished_req_ids:
            self._capturer.remove_request(req_id)
        starts, positions = batch.query_start_loc_np, batch.num_computed_tokens_np
        taken = self._capturer.take_rows(
            batch, starts, torch.from_numpy(positions), int(starts[-1])
        )
        if taken is not None:
            output.routed_experts = taken.to_cpu_nonblocking().tolists()


class Connector:
    """The worker's side on v0.33.0, and in its release."""

    def __init__(
        self, config: Any, kv_cache: Any, shape: tuple[int, int], snapshot: Callable[..., Any]
    ) -> None:
        self._connector = scheduling.make_worker_connector(
            config, kv_cache, shape, "uint8", snapshot
        )
        # As in an engine that has run for a while, the release's store used its memory before.
        arena: Any = getattr(self._connector._store._store, "_arena", b"")
        for page in range(0, len(arena), mmap.PAGESIZE):
            arena[page] = 1

    def take_rows(self, scheduled: Any, batch: Any, output: Any) -> None:
        self._connector.begin_step(scheduled.aux_output_connector_metadata)
        pending = self._connector.prepare_output(batch)
        if pending is not None:
            ones = np.ones(len(batch.req_ids), np.int32)
            pending.enqueue_cpu_copy(ones, ones - 1)
            output.aux_output_connector_output = pending.process_output()


def send(output: Any) -> Any:
    """What the message queue between processes does."""
    buffers: list[pickle.PickleBuffer] = []
    data = pickle.dumps(output, protocol=5, buffer_callback=buffers.append)
    return pickle.loads(data, buffers=[bytes(buffer.raw()) for buffer in buffers])
