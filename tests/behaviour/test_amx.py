# SPDX-License-Identifier: Apache-2.0
"""AMX decides which kernel computes the experts on a CPU. Rows are true with each kernel, on any
machine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from vllm.platforms import current_platform

from harness import oracle, recorder
from harness.choice import Choice
from tests.behaviour.conftest import CHUNK, ENGINES, ask, assert_all_true, random_prompt, running

if TYPE_CHECKING:
    from vllm import LLM

pytestmark = ENGINES

HAS_AMX = torch.cpu._is_amx_tile_supported()
LENGTHS = (5, 2 * CHUNK + 9, 40, 1)
MAX_TOKENS = 8


def skip_without(kernel: str) -> None:
    """vLLM's kernels for a CPU without AVX-512 have no grouped products."""
    current_platform.import_kernels()
    if kernel == "forward_grouped_gemm" and not hasattr(torch.ops._C, "prepack_moe_weight"):
        pytest.skip("grouped products use the instructions of AVX-512")


def assert_kernel(llm: LLM, kernel: str) -> None:
    """This kernel computes the experts of all layers."""

    def find(model: Any) -> set[str]:
        methods = [getattr(module, "quant_method", None) for module in model.modules()]
        kernels = [method.cpu_fused_moe for method in methods if hasattr(method, "cpu_fused_moe")]
        return {getattr(k, "forward_method", type(k)).__name__ for k in kernels}

    assert llm.apply_model(find) == [{kernel}]


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
@pytest.mark.parametrize(
    ("has_amx", "kernel"), [(False, "forward_grouped_gemm"), (True, "forward_torch")]
)
def test_rows_in_float32_are_those_of_transformers(
    checkpoint: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    family: str,
    has_amx: bool,
    kernel: str,
) -> None:
    skip_without(kernel)
    monkeypatch.setattr("torch.cpu._is_amx_tile_supported", lambda: has_amx)
    with running(checkpoint(family)) as llm:
        assert_kernel(llm, kernel)
        outputs = ask(llm, *(random_prompt(i, n) for i, n in enumerate(LENGTHS)))
    assert_all_true(checkpoint(family), outputs)


@pytest.mark.parametrize(
    ("has_amx", "kernel"),
    [(False, "forward_grouped_gemm"), (True, "forward_grouped_gemm"), (True, "SGLFusedMOE")],
)
def test_rows_in_bfloat16_are_what_the_logits_of_the_same_forward_choose(
    checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, has_amx: bool, kernel: str
) -> None:
    if has_amx and not HAS_AMX:
        pytest.skip("bfloat16 kernels use the instructions of AMX")
    skip_without(kernel)
    monkeypatch.setattr("torch.cpu._is_amx_tile_supported", lambda: has_amx)
    monkeypatch.setenv("VLLM_CPU_SGL_KERNEL", str(int(kernel == "SGLFusedMOE")))
    # SGLang's kernels need multiples of 32.
    options = {"dtype": "bfloat16", "worker_extension_cls": "harness.recorder.Recorder"}
    with running(checkpoint(num_experts=32), **options) as llm:
        assert_kernel(llm, kernel)
        llm.collective_rpc("record_start")
        for seed, length in enumerate(LENGTHS):
            (output,) = ask(llm, random_prompt(seed, length), max_tokens=MAX_TOKENS)
            routes = Choice(top_k=4).routes(recorder.take(llm), 4, {})
            rows = output.outputs[0].routed_experts
            assert len(rows) == length + MAX_TOKENS - 1
            # The same logits: only equal ones are tied.
            comparison = oracle.compare(rows, routes, tie=1e-7)
            assert comparison.agree == comparison.rows, comparison.disagreements[0]
            # bfloat16 has few values between neighbours.
            assert comparison.ties <= 1 + 0.05 * comparison.decisions
