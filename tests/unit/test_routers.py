# SPDX-License-Identifier: Apache-2.0
"""Routers of vLLM with the capturer bound to them, without an engine.

The MoE kernel of the CPU engine selects experts itself and never calls these routers. The other
routers, and how ids reach the buffer, are tested in the series, by
`tests/model_executor/test_routed_experts_buffer.py`.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import vllm._custom_ops as ops
import vllm.model_executor.layers.fused_moe.layer as layers
import vllm.model_executor.layers.fused_moe.routed_experts_capture as capturers
import vllm.model_executor.layers.fused_moe.routed_experts_pipeline as pipeline
from transformers.models.llama4.modeling_llama4 import Llama4Router
from vllm.model_executor.layers.fused_moe.router.router_factory import create_fused_moe_router
from vllm.model_executor.models.llama4 import Llama4MoE

TOKENS, EXPERTS, HIDDEN, LAYER = 50, 16, 8, 1


@pytest.fixture
def select(monkeypatch: pytest.MonkeyPatch) -> Callable[..., torch.Tensor]:
    """Makes a router, lets it select, and returns the rows of its layer."""
    config = SimpleNamespace(
        model_config=SimpleNamespace(get_total_num_hidden_layers=lambda: 3),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=TOKENS),
        parallel_config=SimpleNamespace(distributed_executor_backend="uni"),
    )

    class Layer(torch.nn.Module):
        layer_id = LAYER
        layer_name = f"model.layers.{LAYER}.mlp.experts"
        is_sequence_parallel = False
        logical_num_experts = EXPERTS
        quant_method = SimpleNamespace(supports_routed_experts_capture=True)

        def __init__(self, router: Any) -> None:
            super().__init__()
            self.router, self.top_k = router, router.top_k

    monkeypatch.setattr(layers, "FusedMoE", Layer)
    # One process, one micro-batch.
    context = SimpleNamespace(dp_metadata=None, token_offset=0)
    monkeypatch.setattr(capturers, "get_forward_context", lambda: context)
    monkeypatch.setattr(pipeline, "get_pp_group", lambda: SimpleNamespace(world_size=1))
    monkeypatch.setattr(capturers, "get_tp_group", lambda: SimpleNamespace(is_first_rank=True))

    def select(logits: torch.Tensor, input_ids: Any = None, **options: Any) -> torch.Tensor:
        router = create_fused_moe_router(global_num_experts=EXPERTS, **options)
        model = torch.nn.ModuleList([Layer(router)])
        capturer = capturers.RoutedExpertsCapturer.bind(model, config, torch.device("cpu"))
        hidden = torch.zeros(len(logits), HIDDEN)
        router.select_experts(hidden_states=hidden, router_logits=logits, input_ids=input_ids)
        return capturer.snapshot(TOKENS)[:, LAYER].long()

    return select


def test_rows_of_hashed_tokens_are_those_of_the_table(
    select: Callable[..., torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """DeepSeek-V4: some layers select by the token id alone. A stand-in for the CUDA kernel fills
    the memory that it gets."""

    def kernel(weights, ids, indices, logits, renorm, scale, bias, tokens, table) -> None:
        ids.as_strided(ids.shape, (ids.shape[1], 1)).copy_(table[tokens])

    monkeypatch.setattr(ops, "topk_hash_softplus_sqrt", kernel)
    table = torch.stack([torch.randperm(EXPERTS)[:4] for _ in range(100)]).int()
    tokens = torch.randint(100, (TOKENS,))
    options = {"top_k": 4, "scoring_func": "sqrtsoftplus", "hash_indices_table": table}
    rows = select(torch.randn(TOKENS, EXPERTS), tokens, **options)
    assert torch.equal(rows, table[tokens].long())


def test_rows_of_llama_4_are_those_of_transformers(select: Callable[..., torch.Tensor]) -> None:
    """Without an engine, because its CPU kernel is missing."""
    config = SimpleNamespace(hidden_size=HIDDEN, num_local_experts=EXPERTS, num_experts_per_tok=1)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(2)
        scores, logits = Llama4Router(config)(torch.randn(TOKENS, HIDDEN))
    rows = select(logits, top_k=1, custom_routing_function=Llama4MoE.custom_routing_function)
    # Its router scores all experts but the chosen one zero.
    assert torch.equal(rows[:, 0], scores.argmax(-1))


SNAPSHOT = """
import numpy as np, torch, triton, triton.language as tl
import vllm.triton_utils as utils
utils.triton, utils.tl, utils.HAS_TRITON = triton, tl, True
from vllm.model_executor.layers.fused_moe.routed_experts_capture import RoutedExpertsCapturer

for layers, top_k, experts in ((3, 4, 16), (17, 6, 300), (1, 1, 2)):
    capturer = RoutedExpertsCapturer(layers, 40, top_k, experts, (0,), torch.device("cpu"))
    capturer.use_triton = True
    buffer = capturer.buffer.random_(experts).numpy()
    for chosen in (1, 19, torch.tensor([38, 0, 7]), torch.arange(0, 40, 2)):
        rows = capturer.snapshot(chosen).numpy()
        index = slice(chosen) if isinstance(chosen, int) else chosen.numpy()
        assert rows.dtype == (np.uint8 if experts <= 256 else np.uint16)
        np.testing.assert_array_equal(rows, buffer[:, index].transpose(1, 0, 2))
"""


def test_snapshot_kernel_gathers_transposes_and_narrows() -> None:
    """In Triton's interpreter, in another process, because Triton decides at import. tests/gpu runs
    it compiled."""
    done = subprocess.run(
        [sys.executable, "-c", SNAPSHOT],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
