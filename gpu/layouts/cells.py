# SPDX-License-Identifier: Apache-2.0
"""The layouts with their engine options, and the models and prompts of all."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np

from harness.checkpoint import make_checkpoint
from harness.shapes import GPT_OSS

CHUNK = 256
LENGTHS = (5, 300, 33, 700, 64, 2, 257, 128, 3, 17, 90, 411)

OPTIONS: dict[str, Any] = {
    "max_model_len": 1024,
    "max_num_batched_tokens": CHUNK,
    "max_num_seqs": 8,
    "enforce_eager": True,
    "enable_prefix_caching": False,
    "enable_return_routed_experts": True,
    "routed_experts_opt_in": True,
    "skip_tokenizer_init": True,
    "kv_cache_memory_bytes": 256 << 20,
    "gpu_memory_utilization": 0.02,
    "disable_custom_all_reduce": True,
    "seed": 0,
}
GRAPHS = {"enforce_eager": False, "compilation_config": {"cudagraph_capture_sizes": [1, 2, 4, 8]}}
EP = {"enable_expert_parallel": True}


def eplb(asynchronous: bool) -> dict[str, Any]:
    return {
        "enable_eplb": True,
        "eplb_config": {
            "num_redundant_experts": 8,
            "window_size": 4,
            "step_interval": 6,
            "use_async": asynchronous,
        },
    }


@dataclasses.dataclass(frozen=True)
class Cell:
    """One layout."""

    gpus: int
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    dp: int = 1  # offline engines that form one data parallel group
    model: str = "qwen3"
    dtype: str = ""  # if empty, the dtype of the reference
    tokens: int = 24
    records: bool = True  # ranks record their router logits, which CUDA graphs do not allow
    serve: tuple[tuple[str, ...], ...] = ()  # of each `vllm serve`; empty: engines are offline
    disaggregated: bool = False  # a prefill and a decode engine behind a proxy, with NIXL
    hosts: tuple[int, ...] = (2, 4)  # counts of GPUs whose default run has the cell
    note: str = ""


def tp(size: int, **more: Any) -> dict[str, Any]:
    return {"tensor_parallel_size": size, **more}


SERVE_DP = ("--data-parallel-size=2", "--enable-expert-parallel")
# In the order in which they start.
CELLS: dict[str, Cell] = {
    "one": Cell(1, hosts=(1, 2, 4, 8), note="one GPU, the reference"),
    "one-bf16": Cell(1, dtype="bfloat16", hosts=(1, 2, 4, 8), note="one GPU"),
    "one-gptoss": Cell(1, model="gptoss", hosts=(1,), note="one GPU, gpt-oss, MXFP4"),
    "dp2ep2": Cell(2, EP, dp=2, note="DP2+EP2, engines joined by VLLM_DP_*"),
    "tp2": Cell(2, tp(2), hosts=(2,), note="TP2"),
    "sp": Cell(4, tp(2, **EP), dp=2, hosts=(4,), note="TP2xDP2+EP4: sequence parallel MoE"),
    "dp4ep4": Cell(4, EP, dp=4, hosts=(4,), note="DP4+EP4"),
    "tp2pp2": Cell(4, tp(2, pipeline_parallel_size=2), hosts=(4,), note="TP2xPP2"),
    "pp2": Cell(2, {"pipeline_parallel_size": 2}, hosts=(2,), note="PP2"),
    "tp4": Cell(4, tp(4), hosts=(4,), note="TP4"),
    "sp-gptoss": Cell(
        4, tp(2, **EP), dp=2, model="gptoss", hosts=(4,), note="the same, gpt-oss, MXFP4"
    ),
    "tp2ep": Cell(2, tp(2, **EP), hosts=(2,), note="TP2+EP2"),
    "eplb": Cell(
        2, {**EP, **eplb(False)}, dp=2, tokens=120, hosts=(2,), note="DP2+EP2, EPLB, 8 redundant"
    ),
    "eplb-async": Cell(
        2,
        {**EP, **eplb(True)},
        dp=2,
        tokens=120,
        hosts=(2,),
        note="DP2+EP2, asynchronous EPLB, 8 redundant",
    ),
    "dp2ep2-gptoss": Cell(2, EP, dp=2, model="gptoss", hosts=(2,), note="DP2+EP2, gpt-oss, MXFP4"),
    "dp2ep2-graphs": Cell(
        2, {**EP, **GRAPHS}, dp=2, records=False, hosts=(2,), note="DP2+EP2, CUDA graphs"
    ),
    "serve-internal": Cell(
        2,
        serve=((*SERVE_DP, "--api-server-count=2"),),
        hosts=(2,),
        note="DP2+EP2 behind vllm serve, two API servers, internal load balancing",
    ),
    "serve-external": Cell(
        2,
        serve=tuple((*SERVE_DP, f"--data-parallel-rank={i}") for i in range(2)),
        hosts=(2,),
        note="DP2+EP2, a vllm serve each, external load balancing",
    ),
    "dcp2": Cell(
        2,
        tp(2, decode_context_parallel_size=2),
        model="one-kv-head",
        dtype="bfloat16",
        hosts=(2,),
        note="TP2, decode context parallel 2",
    ),
    "pd": Cell(
        2,
        # v0.33.0 wants the prefix cache with a KV connector.
        {"enable_prefix_caching": True},
        serve=((), ()),
        disaggregated=True,
        hosts=(2,),
        note="a prefill and a decode engine behind the proxy, KV over NIXL",
    ),
    "dp2": Cell(2, dp=2, hosts=(2,), note="DP2 without EP"),
    "ray2": Cell(2, tp(2, distributed_executor_backend="ray"), hosts=(2,), note="TP2, Ray"),
    "sp-eplb": Cell(
        4, tp(2, **EP, **eplb(False)), dp=2, tokens=120, hosts=(4,), note="SP, EPLB, 8 redundant"
    ),
    "sp-graphs": Cell(
        4, tp(2, **EP, **GRAPHS), dp=2, records=False, hosts=(4,), note="SP, CUDA graphs"
    ),
    "tp2dp2": Cell(4, tp(2), dp=2, hosts=(4,), note="TP2xDP2 without EP"),
    "pp4": Cell(4, {"pipeline_parallel_size": 4}, hosts=(4,), note="PP4"),
    "pp2dp2ep": Cell(4, {"pipeline_parallel_size": 2, **EP}, dp=2, hosts=(4,), note="PP2xDP2+EP2"),
    "sp8": Cell(8, tp(4, **EP), dp=2, hosts=(8,), note="TP4xDP2+EP8: sequence parallel MoE"),
    "sp8-gptoss": Cell(
        8, tp(4, **EP), dp=2, model="gptoss", hosts=(8,), note="the same, gpt-oss, MXFP4"
    ),
    "serve": Cell(1, serve=((),), hosts=(), note="vllm serve, one GPU"),
}
QWEN3: dict[str, Any] = {
    "hidden_size": 256,
    "head_dim": 64,
    "num_hidden_layers": 6,
    "initializer_range": 0.0625,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 128,
}


def make_model(name: str, folder: Path) -> Path:
    """The folder of the model; the gpt-oss shape is a configuration without weights."""
    if name == "gptoss":
        (folder / name).mkdir(parents=True, exist_ok=True)
        (folder / name / "config.json").write_text(json.dumps(GPT_OSS))
        return folder / name
    # Four key-value heads, so that four pipeline or tensor parallel ranks have one each.
    heads: dict[str, Any] = {"num_key_value_heads": 1 if name == "one-kv-head" else 4}
    return make_checkpoint(folder / name, **QWEN3, **heads)


def make_prompts(vocabulary: int = 700) -> list[list[int]]:
    """The prompts. The first token identifies a prompt."""
    rng = np.random.default_rng(0)
    return [
        [10 + i, *(int(t) for t in rng.integers(4, vocabulary, n - 1))]
        for i, n in enumerate(LENGTHS)
    ]


def asks(index: int) -> bool:
    return index % 3 != 2
