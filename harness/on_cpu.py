# SPDX-License-Identifier: Apache-2.0
"""Which MoE families that `transformers` and a line share run on a CPU, and why the others do not.

`test_all_families.py` of each line tests the first, `docs/features.md` lists both.
"""

from __future__ import annotations

from typing import Any

_BOTH: dict[str, dict[str, Any]] = {
    "dots1": {},
    "ernie4_5_moe": {},
    "flex_olmo": {},
    "glm4_moe": {},
    "granitemoe": {},
    "granitemoehybrid": {},
    "granitemoeshared": {},
    "hunyuan_v1_moe": {},
    "mixtral": {},
    "olmoe": {},
    "phimoe": {"architectures": ["PhiMoEForCausalLM"]},
    "qwen2_moe": {"mlp_only_layers": [2]},
    "qwen3_moe": {"mlp_only_layers": [2]},
}

# By line and family: fields of the configuration on top of the fields in `families.py`.
TESTED: dict[str, dict[str, dict[str, Any]]] = {
    "v0.20.2": {**_BOTH, "dbrx": {}, "llama4": {}, "llama4_text": {}, "qwen3_vl_moe": {}},
    "v0.33.0": {
        **_BOTH,
        "afmoe": {},
        "cohere2_moe": {},
        "exaone_moe": {},
        "gemma4": {},
        "gemma4_text": {},
        "glm4v_moe": {},
        "granitemoe_swa": {},
        "hy_v3": {},
        "laguna": {},
        "lfm2_moe": {},
        "llama4": {},
        "llama4_text": {},
        "mellum": {},
        "minimax": {},
        "minimax_m2": {},
        "solar_open": {},
    },
}

_OWN_LOGITS = "by its own logits (`test_families.py`)"


def _no(error: str) -> str:
    return f"no: without rows too, vLLM raises `{error}`"


# By line and family: why it is not in `TESTED`.
NOT_TESTED: dict[str, dict[str, str]] = {
    "v0.20.2": {
        "deepseek_v2": _OWN_LOGITS,
        "deepseek_v3": _OWN_LOGITS,
        "glm4v_moe": "not compared: `transformers` 4.57.6 does not run it without an image",
        "gpt_oss": _OWN_LOGITS,
        "jamba": _no("too many values to unpack (expected 2)"),
        "longcat_flash": _no("MLA is not supported on CPU."),
        "minimax": _no("'layers.0.self_attn.diagonal_decay'"),
        "qwen3_next": _no("too many values to unpack (expected 2)"),
    },
    "v0.33.0": {
        "axk1": _no(
            "Following weights were not initialized from checkpoint: "
            "{'model.layers.0.post_mlp_layernorm.weight'}"
        ),
        "dbrx": _no("'blocks.0.ffn.experts.w13_weight'"),
        "deepseek_v2": _OWN_LOGITS,
        "deepseek_v3": _OWN_LOGITS,
        "deepseek_v32": _no("Sparse Attention is not supported on CPU."),
        "glm4_moe_lite": _OWN_LOGITS,
        "glm_moe_dsa": _no("Sparse Attention is not supported on CPU."),
        "gpt_oss": _OWN_LOGITS,
        "jamba": _no("'_OpNamespace' '_C' object has no attribute 'selective_scan_fwd'"),
        "jetmoe": "refused: `No supported MoE router found for routed-experts capture.`",
        "kimi_linear": _no("No module named 'cutlass'"),
        "longcat_flash": _no("'layers.0.mlp.experts.16.gate_proj.weight'"),
        "mimo_v2_flash": _OWN_LOGITS,
        "nemotron_h": _no("is_act_and_mul=False is supported only for CUDA, XPU and ROCm for now"),
        "qwen3_5_moe_text": _OWN_LOGITS,
        "qwen3_next": "by its own logits (`test_hybrid.py`)",
        "qwen3_vl_moe": _no(
            "The size of tensor a (64) must match the size of tensor b (128) at non-singleton "
            "dimension 1"
        ),
    },
}
