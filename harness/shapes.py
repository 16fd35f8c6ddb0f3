# SPDX-License-Identifier: Apache-2.0
"""Shapes of published models, as `config.json`: with dummy weights a folder with one is enough.
Fields that have the default of `transformers` are left out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

GPT_OSS_20B: dict[str, Any] = {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "eos_token_id": 200002,
    "head_dim": 64,
    "hidden_size": 2880,
    "initial_context_length": 4096,
    "intermediate_size": 2880,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "max_position_embeddings": 131072,
    "num_attention_heads": 64,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_key_value_heads": 8,
    "num_local_experts": 32,
    "pad_token_id": 199999,
    "quantization_config": {
        "modules_to_not_convert": [
            "model.layers.*.self_attn",
            "model.layers.*.mlp.router",
            "model.embed_tokens",
            "lm_head",
        ],
        "quant_method": "mxfp4",
    },
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "torch_dtype": "bfloat16",
    "vocab_size": 201088,
}

# With fewer layers and a small vocabulary.
GPT_OSS: dict[str, Any] = {
    **GPT_OSS_20B,
    "eos_token_id": 3,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "max_position_embeddings": 4096,
    "num_hidden_layers": 4,
    "pad_token_id": 0,
    "vocab_size": 1024,
}

QWEN3_30B_A3B: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "max_position_embeddings": 40960,
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "rope_theta": 1000000.0,
    "torch_dtype": "bfloat16",
    "vocab_size": 151936,
}

# Rehearses on a CPU; the rows of one token are as many bytes as Qwen3-30B-A3B's with 48 layers.
TINY: dict[str, Any] = {
    **QWEN3_30B_A3B,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "head_dim": 32,
    "hidden_size": 64,
    "intermediate_size": 64,
    "moe_intermediate_size": 32,
    "num_attention_heads": 2,
    "num_experts": 16,
    "num_hidden_layers": 4,
    "num_key_value_heads": 1,
    "torch_dtype": "float32",
    "vocab_size": 768,
}

MODELS: dict[str, dict[str, Any]] = {
    "qwen3-30b-a3b": QWEN3_30B_A3B,
    "gpt-oss-20b": GPT_OSS_20B,
    "tiny": TINY,
}


def model_config(name: str, layers: int | None = None) -> dict[str, Any]:
    """The config of a model, of its first `layers` layers if that is given."""
    config = dict(MODELS[name])
    if layers is not None:
        config["num_hidden_layers"] = layers
        if "layer_types" in config:
            config["layer_types"] = config["layer_types"][:layers]
    return config


def write_model(folder: Path, name: str, layers: int | None = None) -> Path:
    """Make a folder that vLLM loads with `load_format="dummy"`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(model_config(name, layers)) + "\n")
    return folder
