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
    "v0.20.2": {
        **_BOTH,
        "aria": {},
        "dbrx": {},
        "llama4": {},
        "llama4_text": {},
        "qwen3_vl_moe": {},
    },
    "v0.33.0": {
        **_BOTH,
        "afmoe": {},
        "aria": {},
        "aria_text": {},
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


_NO_ROUTER = "refused: `No supported MoE router found for routed-experts capture.`"
_OLD_TRANSFORMERS = _no(
    "Transformers modeling backend requires transformers>=5.0.0 for MoE models support, "
    "but got 4.57.6"
)
_OTHER_TOKENS = "not compared: without rows too, vLLM and `transformers` generate different tokens"


def _lacks(what: str) -> str:
    return f"not compared: vLLM wants {what}, which a random checkpoint does not have"


# By line and family: why it is not in `TESTED`.
NOT_TESTED: dict[str, dict[str, str]] = {
    "v0.20.2": {
        "aria_text": _OLD_TRANSFORMERS,
        "deepseek_v2": _OWN_LOGITS,
        "deepseek_v3": _OWN_LOGITS,
        "doge": _OLD_TRANSFORMERS,
        "glm4v_moe": "not compared: `transformers` 4.57.6 does not run it without an image",
        "gpt_oss": _OWN_LOGITS,
        "jamba": _no("too many values to unpack (expected 2)"),
        "jetmoe": _no("Model architectures ['JetMoeForCausalLM'] are not supported for now."),
        "longcat_flash": _no("MLA is not supported on CPU."),
        "minimax": _no("'layers.0.self_attn.diagonal_decay'"),
        "qwen3_next": _no("too many values to unpack (expected 2)"),
        "qwen3_omni_moe": _lacks("its image processor"),
    },
    "v0.33.0": {
        "axk1": _no(
            "Following weights were not initialized from checkpoint: "
            "{'model.layers.0.post_mlp_layernorm.weight'}"
        ),
        "axk2": _no("Head dimension 64 is not supported by MLA."),
        "dbrx": _no("'blocks.0.ffn.experts.w13_weight'"),
        "deepseek_ocr2": _lacks("its image processor"),
        "deepseek_v2": _OWN_LOGITS,
        "deepseek_v3": _OWN_LOGITS,
        "deepseek_v32": _no("Sparse Attention is not supported on CPU."),
        "deepseek_v4": _no("'_OpNamespace' '_C' object has no attribute 'convert_weight_packed'"),
        "diffusion_gemma": _lacks("the configuration of its sampler"),
        "doge": _NO_ROUTER,
        "ernie4_5_vl_moe": _no("'Ernie4_5_VLMoeVisionConfig' object has no attribute 'embed_dim'"),
        "glm4_moe_lite": _OWN_LOGITS,
        "glm5_next": _no("'Glm5NextTextConfig' object has no attribute 'mhc'"),
        "glm_moe_dsa": _no("Sparse Attention is not supported on CPU."),
        "gpt_oss": _OWN_LOGITS,
        "hy_v4": _no(
            "HYV4 sparse attention was requested, but no valid sparse MLA backend is available for "
            "current runtime/config."
        ),
        "inkling_mm_model": _lacks("the special tokens of its tokenizer"),
        "inkling_text": _lacks("the special tokens of its tokenizer"),
        "jamba": _no("'_OpNamespace' '_C' object has no attribute 'selective_scan_fwd'"),
        "jetmoe": _NO_ROUTER,
        "kimi_linear": _no("No module named 'cutlass'"),
        "longcat_flash": _no("'layers.0.mlp.experts.16.gate_proj.weight'"),
        "mimo_v2_flash": _OWN_LOGITS,
        "minimax_m3_vl": _no(
            "'PreTrainedConfig' object has no attribute 'img_token_compression_config'"
        ),
        "minimax_m3_vl_text": _OTHER_TOKENS,
        "mistral4": _no("Head dimension 192 is not supported by MLA."),
        "nemotron_h": _no("is_act_and_mul=False is supported only for CUDA, XPU and ROCm for now"),
        "qwen3_5_moe": _OWN_LOGITS,
        "qwen3_5_moe_text": _OWN_LOGITS,
        "qwen3_next": "by its own logits (`test_hybrid.py`)",
        "qwen3_omni_moe": _no(
            "'Qwen3OmniMoeVisionEncoderConfig' object has no attribute 'image_size'"
        ),
        "qwen3_omni_moe_thinker": _lacks("its processor"),
        "qwen3_vl_moe": _no(
            "The size of tensor a (64) must match the size of tensor b (128) at non-singleton "
            "dimension 1"
        ),
        "qwen4_exp": _no(
            "expected m1 and m2 to have the same dtype, but got: float != c10::BFloat16"
        ),
        "qwen4_exp_text": _no(
            "expected m1 and m2 to have the same dtype, but got: float != c10::BFloat16"
        ),
        "step3p7": _no("'Step3p7VisionConfig' object has no attribute 'output_dim'"),
        "zaya": _OTHER_TOKENS,
    },
}

_BOTH_LACK = (
    "BailingMoeForCausalLM",
    "BailingMoeV2ForCausalLM",
    "BailingMoeV2_5ForCausalLM",
    "DeepseekForCausalLM",
    "ExaoneMoEForCausalLM",
    "InternS1ProForConditionalGeneration",
    "MiniCPMForCausalLM",
    "MiniCPMV",
    "MistralLarge3ForCausalLM",
    "NemotronHPuzzleForCausalLM",
    "NemotronH_Nano_Omni_Reasoning_V3",
    "NemotronH_Nano_VL_V2",
    "NemotronH_Super_Omni_Reasoning_V3",
    "PanguEmbeddedForCausalLM",
    "PanguProMoEV2ForCausalLM",
    "PanguUltraMoEForCausalLM",
    "Param2MoEForCausalLM",
    "SarvamMLAForCausalLM",
    "SarvamMoEForCausalLM",
    "Step3TextForCausalLM",
    "Step3p5ForCausalLM",
)

# By line: architectures that vLLM has and `transformers` does not. They have experts, or may have
# some. No test compares their rows.
NOT_IN_TRANSFORMERS: dict[str, list[str]] = {
    "v0.20.2": sorted(
        [
            *_BOTH_LACK,
            "AXK1ForCausalLM",
            "AfmoeForCausalLM",
            "ArcticForCausalLM",
            "DeepseekV32ForCausalLM",
            "DeepseekV4ForCausalLM",
            "Ernie4_5_VLMoeForConditionalGeneration",
            "Gemma4ForCausalLM",
            "Gemma4ForConditionalGeneration",
            "Glm4MoeLiteForCausalLM",
            "GlmMoeDsaForCausalLM",
            "Grok1ForCausalLM",
            "Grok1ModelForCausalLM",
            "HYV3ForCausalLM",
            "KimiLinearForCausalLM",
            "Lfm2MoeForCausalLM",
            "MiMoV2FlashForCausalLM",
            "MiniCPM3ForCausalLM",
            "MiniMaxM1ForCausalLM",
            "MiniMaxM2ForCausalLM",
            "MiniMaxText01ForCausalLM",
            "NemotronHForCausalLM",
            "Qwen3_5ForConditionalGeneration",
            "Qwen3_5MoeForConditionalGeneration",
        ]
    ),
    "v0.33.0": sorted(
        [
            *_BOTH_LACK,
            "AliceAIForCausalLM",
            "BailingMoeV3ForCausalLM",
            "BailingMoeV3VLForConditionalGeneration",
            "BeamForCausalLM",
            "DeepseekV41ForCausalLM",
            "Dots3NoteForCausalLM",
            "FlintForCausalLM",
            "Glm5NextForCausalLM",
            "HfMoondream",
            "InternS2MobiusForConditionalGeneration",
            "InternS2PreviewForConditionalGeneration",
            "K2HorizonForCausalLM",
            "KimiK3ForConditionalGeneration",
            "LongcatFlashNgramForCausalLM",
            "MiMoV2ForCausalLM",
            "MiMoV2OmniForCausalLM",
            "MiniCPMOcrForConditionalGeneration",
            "MiniMaxM3SparseForCausalLM",
            "Moondream3ForCausalLM",
            "MuseSparkForConditionalGeneration",
            "Step5ForCausalLM",
        ]
    ),
}
