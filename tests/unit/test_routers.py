# SPDX-License-Identifier: Apache-2.0
"""Every router class of vLLM with the capturer bound to it, without an engine.

The MoE kernel of the CPU engine selects experts itself and never calls these routers.

| router | its ids come from | here |
|---|---|---|
| FusedTopKRouter, FusedTopKBiasRouter | CUDA kernels that fill the tensor they are given |
  stand-ins that do the same; the kernels in tests/gpu |
| FusedTopKBiasRouter on ROCm, softmax | torch | real |
| GroupedTopKRouter | torch; the routers above where experts cannot be grouped | real |
| CustomRoutingRouter (Llama-4, whose CPU kernel is missing: it asserts
  `not apply_router_weight_on_input`) | torch | real |
| ZeroExpertRouter | the CUDA kernels, behind which it masks the ids of zero experts |
  real, with stand-ins for the kernel and for the zero experts' output |

How ids reach the buffer (dtype, smaller top-k, EPLB, in place or copied) and which routers are
refused is tested in the series, by `tests/model_executor/test_routed_experts_buffer.py`.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import vllm._custom_ops as ops
import vllm.model_executor.layers.fused_moe.layer as layers
import vllm.model_executor.layers.fused_moe.routed_experts_capture as capturers
import vllm.model_executor.layers.fused_moe.routed_experts_pipeline as pipeline
import vllm.model_executor.layers.fused_moe.router.zero_expert_router as zero
from transformers.models.llama4.modeling_llama4 import Llama4Router
from vllm._aiter_ops import rocm_aiter_ops
from vllm.model_executor.layers.fused_moe.router.router_factory import create_fused_moe_router
from vllm.model_executor.models.llama4 import Llama4MoE

from harness.choice import Choice

TOKENS, EXPERTS, HIDDEN, TOP_K, LAYERS = 50, 16, 8, 4, 3
LAYER = 1


@dataclass(frozen=True)
class Case:
    """A router of vLLM's factory, and what it should choose."""

    router: str
    choice: Choice
    biased: bool = False
    experts: int = EXPERTS
    rocm: bool = False


SOFTMAX, SIGMOID = Choice(TOP_K), Choice(TOP_K, scoring="sigmoid")
CASES = {
    "softmax": Case("FusedTopKRouter", SOFTMAX),
    "sigmoid": Case("FusedTopKRouter", SIGMOID),
    "top_1": Case("FusedTopKRouter", Choice(1)),
    "300_experts": Case("FusedTopKRouter", SOFTMAX, experts=300),
    "softmax_bias": Case("FusedTopKBiasRouter", SOFTMAX, biased=True),
    "sigmoid_bias": Case("FusedTopKBiasRouter", SIGMOID, biased=True),
    "sqrtsoftplus_bias": Case(
        "FusedTopKBiasRouter", Choice(TOP_K, scoring="sqrtsoftplus"), biased=True
    ),
    "softmax_bias_on_rocm": Case("FusedTopKBiasRouter", SOFTMAX, biased=True, rocm=True),
    "grouped_softmax": Case("GroupedTopKRouter", Choice(TOP_K, 4, 2)),
    "grouped_sigmoid_bias": Case("GroupedTopKRouter", Choice(TOP_K, 4, 2, "sigmoid"), biased=True),
    "grouped_softmax_bias": Case("GroupedTopKRouter", Choice(TOP_K, 4, 2, "softmax"), biased=True),
}


@pytest.fixture
def bind(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], Any]:
    """Binds a capturer to layers of these routers, by layer number."""

    class Layer(torch.nn.Module):
        def __init__(self, layer_id: int, router: Any) -> None:
            super().__init__()
            self.layer_id = layer_id
            self.layer_name = f"model.layers.{layer_id}.mlp.experts"
            self.is_sequence_parallel = False
            self.router = router
            self.top_k = router.top_k
            self.logical_num_experts = router.global_num_experts
            self.quant_method = SimpleNamespace(supports_routed_experts_capture=True)

    monkeypatch.setattr(layers, "FusedMoE", Layer)
    # One process, one micro-batch.
    context = SimpleNamespace(dp_metadata=None, token_offset=0)
    monkeypatch.setattr(capturers, "get_forward_context", lambda: context)
    monkeypatch.setattr(pipeline, "get_pp_group", lambda: SimpleNamespace(world_size=1))
    monkeypatch.setattr(capturers, "get_tp_group", lambda: SimpleNamespace(is_first_rank=True))

    def bind(routers: dict[int, Any]) -> Any:
        config = SimpleNamespace(
            model_config=SimpleNamespace(get_total_num_hidden_layers=lambda: LAYERS),
            scheduler_config=SimpleNamespace(max_num_batched_tokens=TOKENS),
            parallel_config=SimpleNamespace(distributed_executor_backend="uni"),
        )
        modules = torch.nn.ModuleList([Layer(i, router) for i, router in routers.items()])
        return capturers.RoutedExpertsCapturer.bind(modules, config, torch.device("cpu"))

    return bind


@pytest.fixture(autouse=True)
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand-ins for the CUDA kernels. Like these, they fill the memory that they get and assume
    that it is contiguous."""
    scorings = {"softmax": lambda x: x.softmax(-1), "sigmoid": torch.sigmoid}

    def fill(weights: Any, ids: Any, scores: Any, chosen: Any) -> None:
        ids.as_strided(ids.shape, (ids.shape[1], 1)).copy_(chosen)
        weights.copy_(scores.gather(1, chosen))

    def by(scoring: str) -> Callable[..., None]:
        def kernel(weights, ids, indices, logits, renormalize, bias=None) -> None:
            scores = scorings[scoring](logits)
            biased = scores if bias is None else scores + bias
            fill(weights, ids, scores, biased.topk(ids.shape[1]).indices)

        return kernel

    def hashing(weights, ids, indices, logits, renorm, scale, bias, tokens, table) -> None:
        scores = F.softplus(logits).sqrt()
        if table is None:
            fill(weights, ids, scores, (scores + bias).topk(ids.shape[1]).indices)
        else:
            fill(weights, ids, scores, table[tokens])

    monkeypatch.setattr(ops, "topk_softmax", by("softmax"))
    monkeypatch.setattr(ops, "topk_sigmoid", by("sigmoid"))
    monkeypatch.setattr(ops, "topk_hash_softplus_sqrt", hashing)


def make_router(case: Case, bias: torch.Tensor | None, **options: Any) -> Any:
    if case.choice.groups > 1:
        options |= {
            "use_grouped_topk": True,
            "num_expert_group": case.choice.groups,
            "topk_group": case.choice.top_groups,
        }
    return create_fused_moe_router(
        top_k=case.choice.top_k,
        global_num_experts=case.experts,
        scoring_func=case.choice.scoring,
        e_score_correction_bias=bias,
        **options,
    )


def random_logits(experts: int = EXPERTS, tokens: int = TOKENS) -> torch.Tensor:
    return torch.randn(tokens, experts, generator=torch.Generator().manual_seed(0)) * 2


def select(router: Any, logits: torch.Tensor, **options: Any) -> torch.Tensor:
    """The ids and weights that the router passes to the MoE kernel."""
    hidden = torch.zeros(len(logits), HIDDEN)
    _, ids = router.select_experts(hidden_states=hidden, router_logits=logits, **options)
    return ids


def assert_chosen(rows: torch.Tensor, case: Case, logits: Any, bias: Any) -> None:
    """The bound layer has the experts of the published formula, the others none."""
    biases = {} if bias is None else {LAYER: bias.numpy()}
    want = case.choice.routes({LAYER: logits.numpy()}, LAYERS, biases).ids[0]
    got = rows.numpy()
    assert not got[:, [i for i in range(LAYERS) if i != LAYER]].any()
    np.testing.assert_array_equal(np.sort(got[:, LAYER], axis=-1), want)


@pytest.mark.parametrize("name", CASES)
def test_rows_are_what_the_published_formula_chooses(
    name: str, bind: Callable[[Any], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    case = CASES[name]
    monkeypatch.setattr(rocm_aiter_ops, "is_fused_moe_enabled", lambda: case.rocm)
    bias = torch.linspace(-0.4, 0.4, case.experts).flip(0) if case.biased else None
    router = make_router(case, bias)
    assert type(router).__name__ == case.router
    capturer = bind({LAYER: router})
    logits = random_logits(case.experts)
    ids = select(router, logits)
    rows = capturer.snapshot(TOKENS)
    assert torch.equal(rows[:, LAYER].long(), ids.long())
    assert_chosen(rows, case, logits, bias)


@pytest.mark.parametrize("biased", [False, True])
def test_rows_are_true_where_experts_cannot_be_grouped(
    biased: bool, bind: Callable[[Any], Any]
) -> None:
    ungrouped = Case("", SOFTMAX, experts=14)
    bias = torch.linspace(0.4, -0.4, 14) if biased else None
    router = make_router(Case("", Choice(TOP_K, 4, 2), experts=14), bias)
    assert type(router).__name__ == "GroupedTopKRouter"
    capturer = bind({LAYER: router})
    logits = random_logits(14)
    select(router, logits)
    assert_chosen(capturer.snapshot(TOKENS), ungrouped, logits, bias)


def test_rows_of_hashed_tokens_are_those_of_the_table(bind: Callable[[Any], Any]) -> None:
    """DeepSeek-V4: some layers select by the token id alone."""
    table = random_logits(tokens=100).topk(TOP_K).indices.int()
    case = Case("", Choice(TOP_K, scoring="sqrtsoftplus"))
    router = make_router(case, None, hash_indices_table=table)
    capturer = bind({LAYER: router})
    tokens = torch.randint(100, (TOKENS,), generator=torch.Generator().manual_seed(1))
    select(router, random_logits(), input_ids=tokens)
    assert torch.equal(capturer.snapshot(TOKENS)[:, LAYER].int(), table[tokens])


def test_rows_of_llama_4_are_those_of_transformers(bind: Callable[[Any], Any]) -> None:
    config = SimpleNamespace(hidden_size=HIDDEN, num_local_experts=EXPERTS, num_experts_per_tok=1)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(2)
        scores, logits = Llama4Router(config)(torch.randn(TOKENS, HIDDEN))
    router = make_router(
        Case("", Choice(1)), None, custom_routing_function=Llama4MoE.custom_routing_function
    )
    assert type(router).__name__ == "CustomRoutingRouter"
    capturer = bind({LAYER: router})
    select(router, logits)
    # Its router scores all experts but the chosen one zero.
    assert torch.equal(capturer.snapshot(TOKENS)[:, LAYER, 0].long(), scores.argmax(-1))


def test_zero_experts_keep_their_ids(
    bind: Callable[[Any], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(zero, "zero_experts_compute_triton", lambda **_: None)
    case, bias = Case("", SOFTMAX, biased=True), torch.linspace(-0.1, 0.1, EXPERTS)
    router = make_router(
        case,
        torch.nn.Parameter(bias),
        zero_expert_type="identity",
        num_logical_experts=EXPERTS - 2,
    )
    assert type(router).__name__ == "ZeroExpertRouter"
    capturer = bind({LAYER: router})
    logits = random_logits()
    # The MoE kernel gets no id of a zero expert; the rows have all.
    assert select(router, logits).max() < EXPERTS - 2
    assert capturer.snapshot(TOKENS).max() >= EXPERTS - 2
    assert_chosen(capturer.snapshot(TOKENS), case, logits, bias)


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
