# SPDX-License-Identifier: Apache-2.0
"""What of the capture needs a kernel that no CPU has, with stand-ins for it.

Other routers, and how ids reach the buffer, are tested in the series, by
`tests/model_executor/test_routed_experts_buffer.py`.
"""

from __future__ import annotations

import os
import subprocess
import sys
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import vllm._custom_ops as ops
import vllm.model_executor.layers.fused_moe.routed_experts_capture as capturers
from vllm.model_executor.layers.fused_moe.router.router_factory import create_fused_moe_router

TOKENS = 50
EXPERTS = 16
TOP_K = 4
LAYER = 1


def test_rows_of_hashed_tokens_are_those_of_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepSeek-V4: some layers select by the token id alone. A stand-in for the CUDA kernel fills
    the memory that it gets."""

    def kernel(weights, ids, indices, logits, renorm, scale, bias, tokens, table) -> None:
        ids.as_strided(ids.shape, (ids.shape[1], 1)).copy_(table[tokens])

    monkeypatch.setattr(ops, "topk_hash_softplus_sqrt", kernel)
    # One process, one micro-batch.
    context = SimpleNamespace(dp_metadata=None, token_offset=0)
    monkeypatch.setattr(capturers, "get_forward_context", lambda: context)
    table = torch.stack([torch.randperm(EXPERTS)[:TOP_K] for _ in range(100)]).int()
    tokens = torch.randint(100, (TOKENS,))
    capturer = capturers.RoutedExpertsCapturer(
        3, TOKENS, TOP_K, EXPERTS, (LAYER,), torch.device("cpu")
    )
    router = create_fused_moe_router(
        global_num_experts=EXPERTS,
        top_k=TOP_K,
        scoring_func="sqrtsoftplus",
        hash_indices_table=table,
    )
    router.set_capture_fn(
        partial(capturer.capture, LAYER), partial(capturer.get_topk_ids_out, LAYER)
    )
    router.select_experts(torch.zeros(TOKENS, 8), torch.randn(TOKENS, EXPERTS), input_ids=tokens)
    assert torch.equal(capturer.snapshot(TOKENS)[:, LAYER].long(), table[tokens].long())


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
    """In Triton's interpreter, in another process, because Triton decides at import."""
    done = subprocess.run(
        [sys.executable, "-c", SNAPSHOT],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
