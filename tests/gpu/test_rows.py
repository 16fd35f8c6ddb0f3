# SPDX-License-Identifier: Apache-2.0
"""On a GPU: rows are the top-k of the router's own logits in the same forward pass.

The oracle copies the logits in front of the router into buffers that the CUDA graph writes too, and
takes the k greatest in torch. Logits in bfloat16 are often equal, and either of two equal ones is
right, so the logits of the chosen experts are compared.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("no GPU", allow_module_level=True)

from harness.checkpoint import make_checkpoint
from harness.shapes import GPT_OSS
from tests.behaviour.conftest import ask, random_prompt

if TYPE_CHECKING:
    from vllm import LLM, RequestOutput

CHUNK = 256
OPTIONS: dict[str, Any] = {
    "dtype": "bfloat16",
    "max_model_len": 1024,
    "max_num_batched_tokens": CHUNK,
    "max_num_seqs": 16,
    "enable_prefix_caching": True,
    "enable_return_routed_experts": True,
    "routed_experts_opt_in": True,
    "gpu_memory_utilization": 0.3,
    "kv_cache_memory_bytes": 1 << 30,
    "seed": 0,
    "compilation_config": {"cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32, 64]},
}


class Tap:
    """Router logits by request and position, of the last forward pass that processed it."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        import vllm.model_executor.layers.fused_moe.experts.gpt_oss_triton_kernels_moe as oai
        from vllm.model_executor.layers.fused_moe.routed_experts_capture import (
            RoutedExpertsCapturer,
        )
        from vllm.model_executor.layers.fused_moe.router.base_router import BaseRouter

        self.buffers: dict[int, torch.Tensor] = {}
        self.steps: list[tuple[Any, dict[int, torch.Tensor]]] = []
        select_experts = BaseRouter.select_experts
        take_rows = RoutedExpertsCapturer.take_rows
        oai_forward = oai.triton_kernel_moe_forward

        def keep(capture_fn: Any, router_logits: Any) -> None:
            if capture_fn is None:
                return
            layer = capture_fn.args[0]
            if layer not in self.buffers:
                shape = (4 * CHUNK, router_logits.shape[1])
                self.buffers[layer] = router_logits.new_zeros(shape)
            self.buffers[layer][: len(router_logits)] = router_logits

        def tapped_select(router: Any, hidden_states: Any, router_logits: Any, **kw: Any) -> Any:
            keep(router.capture_fn, router_logits)
            return select_experts(router, hidden_states, router_logits, **kw)

        def tapped_oai_forward(*, gating_output: Any, capture_fn: Any, **kw: Any) -> Any:
            keep(capture_fn, gating_output)
            return oai_forward(gating_output=gating_output, capture_fn=capture_fn, **kw)

        def tapped_take_rows(capturer: Any, batch: Any, starts: np.ndarray, *more: Any) -> Any:
            tensors = take_rows(capturer, batch, starts, *more)
            if tensors is not None:
                tokens = np.concatenate(
                    [
                        np.arange(starts[i], starts[i + 1])
                        for i, req_id in enumerate(batch.req_ids)
                        if req_id in tensors.req_ids
                    ]
                )
                index = torch.from_numpy(tokens).to(capturer.buffer.device)
                logits = {layer: b[index] for layer, b in self.buffers.items()}
                self.steps.append((tensors, logits))
            return tensors

        patch.setattr(BaseRouter, "select_experts", tapped_select)
        patch.setattr(oai, "triton_kernel_moe_forward", tapped_oai_forward)
        patch.setattr(RoutedExpertsCapturer, "take_rows", tapped_take_rows)

    def take(self) -> dict[str, dict[int, list[np.ndarray]]]:
        """(layers, experts) float32 of every pass, by request and position, since the last call."""
        logits: dict[str, dict[int, list[np.ndarray]]] = defaultdict(lambda: defaultdict(list))
        for tensors, by_layer in self.steps:
            stacked = torch.stack([by_layer[layer] for layer in sorted(by_layer)], 1)
            rows = iter(stacked.float().cpu().numpy())
            first = tensors.positions.tolist()
            for req_id, start, count in zip(tensors.req_ids, first, tensors.num_rows, strict=True):
                for position in range(start, start + count):
                    logits[req_id][position].append(next(rows))
        self.steps.clear()
        return logits


@pytest.fixture(scope="module")
def tap() -> Iterator[Tap]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        yield Tap(patch)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(
        tmp_path_factory.mktemp("checkpoint") / "qwen3",
        hidden_size=256,
        head_dim=64,
        num_experts=64,
        num_experts_per_tok=8,
        moe_intermediate_size=128,
        mlp_only_layers=[1],
    )


@pytest.fixture(scope="module")
def start(model: Path, tap: Tap) -> Iterator[Callable[..., LLM]]:
    from vllm import LLM

    running: list[LLM] = []

    def make(path: Path = model, **options: Any) -> LLM:
        stop()
        tap.buffers.clear()
        running.append(LLM(str(path), **{**OPTIONS, **options}))
        return running[-1]

    def stop() -> None:
        from vllm.distributed import cleanup_dist_env_and_memory

        while running:
            running.pop().llm_engine.engine_core.shutdown()
        # An engine in this process leaves its process groups; other tests make their own.
        cleanup_dist_env_and_memory()

    yield make
    stop()


def generate(llm: LLM, prompts: list[list[int]], asks: list[bool], **sampling: Any) -> Any:
    each = [{"extra_args": {"return_routed_experts": asked}} for asked in asks]
    return ask(llm, *prompts, each=each, **{"max_tokens": 24, **sampling})


def assert_true_rows(outputs: list[RequestOutput], tap: Tap, preempted: bool = False) -> None:
    """The chosen logits of every row are the greatest of the request's last forward pass, or, for a
    cached prefix, of the pass of the request that computed it. A preempted request computes
    returned rows again, so any of its passes may match."""
    logits = tap.take()
    by_prefix: dict[tuple[int, ...], list[np.ndarray]] = {}
    sequences = {}
    for output in outputs:
        for completion in output.outputs:
            if completion.routed_experts is not None:
                tokens = [*output.prompt_token_ids, *completion.token_ids]
                sequences[output.request_id] = (tokens, completion)
    for req_id, (tokens, _) in sequences.items():
        # The engine appends to the id that it was given.
        for known, by_position in logits.items():
            if known.split("-")[0] == req_id:
                for position, passes in by_position.items():
                    seen = passes if preempted else passes[-1:]
                    by_prefix.setdefault(tuple(tokens[: position + 1]), seen)
    checked = 0
    for tokens, completion in sequences.values():
        rows = completion.routed_experts
        assert len(rows) == len(tokens) - 1
        moe_rows = rows[:, list(completion.moe_layers)].astype(np.int64)
        for position, chosen in enumerate(moe_rows):
            assert any(
                np.array_equal(
                    np.sort(np.take_along_axis(row, chosen, 1), 1),
                    np.sort(row, 1)[:, -chosen.shape[1] :],
                )
                for row in by_prefix[tuple(tokens[: position + 1])]
            )
            assert all(len(set(ids)) == len(ids) for ids in chosen.tolist())
            checked += 1
    assert checked > 100


LENGTHS = (5, 300, 33, 700, 64, 2, 257, 128)


def mixed_batch(llm: LLM) -> Any:
    prompts = [random_prompt(i, n) for i, n in enumerate(LENGTHS)]
    asks = [i % 3 != 2 for i in range(len(prompts))]
    outputs = generate(llm, prompts, asks)
    for output, asked in zip(outputs, asks, strict=True):
        assert (output.outputs[0].routed_experts is not None) == asked
    return outputs


def test_graphs_and_asynchronous_scheduling(start: Callable[..., LLM], tap: Tap) -> None:
    llm = start()
    config = llm.llm_engine.vllm_config
    assert config.scheduler_config.async_scheduling
    assert config.compilation_config.cudagraph_mode.has_full_cudagraphs()
    assert_true_rows(mixed_batch(llm), tap)
    # The second time everything hits the prefix cache, and their rows are there.
    first, second = (generate(llm, [random_prompt(9, 600)], [True]) for _ in range(2))
    assert second[0].num_cached_tokens > 500
    np.testing.assert_array_equal(
        second[0].outputs[0].routed_experts[:500], first[0].outputs[0].routed_experts[:500]
    )
    tap.take()
    assert not llm.llm_engine.engine_core.engine_core.scheduler.routed_experts.requests


def test_preemption(start: Callable[..., LLM], tap: Tap) -> None:
    llm = start(num_gpu_blocks_override=60, max_model_len=512, enable_prefix_caching=False)
    prompts = [random_prompt(20 + i, 100) for i in range(12)]
    outputs = generate(llm, prompts, [True] * 12, max_tokens=150)
    assert_true_rows(outputs, tap, preempted=True)


def test_speculative_decoding(start: Callable[..., LLM], tap: Tap) -> None:
    llm = start(
        speculative_config={
            "method": "ngram",
            "num_speculative_tokens": 3,
            "prompt_lookup_max": 3,
            "prompt_lookup_min": 1,
        }
    )
    prompts = [random_prompt(40 + i, 12) * 6 for i in range(4)]
    assert_true_rows(generate(llm, prompts, [True] * 4, max_tokens=64), tap)


def test_gpt_oss_with_its_default_kernel(
    start: Callable[..., LLM], tap: Tap, tmp_path: Path
) -> None:
    """The kernel selects the experts itself, and hides them in the pinned release."""
    (tmp_path / "config.json").write_text(json.dumps(GPT_OSS))
    llm = start(tmp_path, load_format="dummy", skip_tokenizer_init=True)
    runner = llm.llm_engine.model_executor.driver_worker.worker.model_runner
    for layer in runner.get_model().model.layers:
        # Dummy weights route every token alike.
        layer.mlp.router.weight.data.normal_(std=0.5)
        experts = layer.mlp.experts.quant_method
        assert experts.is_monolithic
    outputs = mixed_batch(llm)
    assert_true_rows(outputs, tap)
    used = np.unique(outputs[3].outputs[0].routed_experts[:, 0])
    assert len(used) > 16


def test_rows_after_sleep_and_new_weights(start: Callable[..., LLM], tap: Tap) -> None:
    llm = start(enable_sleep_mode=True)
    assert_true_rows(mixed_batch(llm), tap)
    llm.sleep(level=1)
    llm.wake_up()
    assert_true_rows(mixed_batch(llm), tap)
    llm.collective_rpc("reload_weights")
    assert llm.reset_prefix_cache()
    assert_true_rows(mixed_batch(llm), tap)
