# SPDX-License-Identifier: Apache-2.0
"""Families of MoE models: classes in `transformers`, small sizes, and where the routers are.

`checkpoint.py` makes random checkpoints of them, `oracle.py` hooks their routers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

VOCAB_SIZE = 768

# Sizes that all families share. An initializer range of 1 / sqrt(hidden) keeps activations of order
# one, so that each layer changes the routing of the next. With the usual 0.02 a token would take
# the same experts at any position, and a row at the wrong position would look right.
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "initializer_range": 0.125,
    "tie_word_embeddings": False,
}
TOP_K = 4
# The first of these fields in a configuration counts its routed experts.
EXPERTS = (
    "num_experts",
    "num_local_experts",
    "n_routed_experts",
    "moe_num_experts",
    "ffn_config.moe_num_experts",
)


@dataclass(frozen=True)
class Family:
    """What differs between model families.

    Attributes:
        name: with which the names of its classes in `transformers` begin.
        router: a router's name inside its decoder layer. Releases of `transformers` differ: the
            first name that is there.
        settings: configuration fields on top of `COMMON`.
        top_k: configuration field of the top-k, a number or one for each layer.
        scores: what the router chooses its top-k by, plus a correction bias if it has one:
            "logits" (softmax does not change their order), "softmax" or "sigmoid" of the logits.
        bias: the bias' name inside its decoder layer, the first name that is there.
        dtype: dtype of the saved weights.
        layers: name of the list of decoder layers.
        text: whether it is the text model of a family, without the vision tower.
        vision: configuration fields of the vision tower, if the model has one. The other settings
            then belong to its text model.
    """

    name: str
    router: tuple[str, ...] = ("mlp.gate",)
    settings: Mapping[str, Any] = field(default_factory=dict)
    top_k: str = "num_experts_per_tok"
    scores: str = "logits"
    bias: tuple[str, ...] = ("mlp.gate.e_score_correction_bias",)
    dtype: str = "float32"
    layers: str = "model.layers"
    text: bool = False
    vision: Mapping[str, Any] | None = None

    @property
    def config(self) -> str:
        """The configuration class."""
        return self.name + ("TextConfig" if self.text else "Config")

    @property
    def model(self) -> str:
        """The class of the model."""
        return self.name + ("ForCausalLM" if self.vision is None else "ForConditionalGeneration")

    @property
    def router_std(self) -> float:
        """Standard deviation of the routers' weights; 0.5 spreads logits to +-4. Float32 sigmoids
        of large logits round to ties."""
        return 0.5 if self.scores == "logits" else 0.125


# On a CPU vLLM needs VLLM_MLA_DISABLE=1 for these. Its attention then differs from
# transformers': rows need another oracle there, the router's logits of the same forward.
_MLA = {
    "q_lora_rank": None,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 32,
    "v_head_dim": 64,
    "num_key_value_heads": 4,
}
_SHARED = {
    "n_routed_experts": 16,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "intermediate_size": 128,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
}

# Families whose heads have no size of their own: 64 / 2 heads gives the 32 that the CPU takes.
_TWO_HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1}
_EXPERTS = {"num_experts": 16, "moe_intermediate_size": 64, "intermediate_size": 128}
_LOCAL = {"num_local_experts": 16, "intermediate_size": 64}
_TWO_OF_EIGHT = {"num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 64}
_GRANITE = {**_TWO_HEADS, **_LOCAL}
_GRANITE_ROUTER = ("block_sparse_moe.router.layer", "block_sparse_moe.router")
_SLIDING = {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 512}
_TOWER = {"hidden_size": 64, "intermediate_size": 64}
_TOWER |= {"num_hidden_layers": 1, "num_attention_heads": 2}
_VISION = {"depth": 1, "hidden_size": 64, "intermediate_size": 64, "num_heads": 2}
_VISION |= {"out_hidden_size": 64}

FAMILIES: dict[str, Family] = {
    "qwen3_moe": Family(
        "Qwen3Moe",
        settings={
            "head_dim": 32,
            **_EXPERTS,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "norm_topk_prob": True,
        },
    ),
    "mixtral": Family(
        "Mixtral",
        router=("block_sparse_moe.gate", "mlp.gate"),
        settings={"head_dim": 32, **_TWO_OF_EIGHT, "sliding_window": None},
    ),
    "olmoe": Family(
        "Olmoe",
        # OLMoE has no head_dim of its own: 64 / 2 heads gives the 32 that the CPU takes.
        settings={
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "num_experts": 16,
            "intermediate_size": 64,
            "norm_topk_prob": False,
        },
    ),
    "glm4_moe": Family(
        "Glm4Moe",
        settings={**_SHARED, "head_dim": 32, "use_qk_norm": True},
        scores="sigmoid",
    ),
    "deepseek_v2": Family(
        "DeepseekV2",
        settings={**_SHARED, **_MLA, "topk_method": "greedy", "norm_topk_prob": False},
    ),
    "deepseek_v3": Family(
        "DeepseekV3",
        # transformers' class has no other method; vLLM reads it from the configuration.
        settings={**_SHARED, **_MLA, "topk_method": "noaux_tc", "scoring_func": "sigmoid"},
        scores="sigmoid",
    ),
    "gpt_oss": Family(
        "GptOss",
        router=("mlp.router",),
        settings={
            "head_dim": 32,
            **_LOCAL,
            "sliding_window": 128,
            "max_position_embeddings": 131072,  # what its default rope_scaling makes of 4096
        },
        dtype="bfloat16",  # the only one vLLM's CPU kernels take; no float32 oracle fits
    ),
    "hunyuan_v1_moe": Family(
        "HunYuanMoEV1",
        router=("mlp.gate.wg",),
        top_k="moe_topk",
        settings={
            "head_dim": 32,
            "num_experts": 16,
            "moe_topk": [4, 2, 4, 3],
            "intermediate_size": 64,
            # vLLM reads these from the published configurations; transformers has them fixed.
            "moe_intermediate_size": 64,
            "num_shared_expert": 1,
            "use_mixed_mlp_moe": True,
            "use_qk_norm": True,
        },
    ),
}

_LINEAR = {
    "shared_expert_intermediate_size": 64,
    "layer_types": ["linear_attention", "full_attention"] * 2,
    # The CPU's kernel of the linear layers takes heads of 128. Wide heads of attention keep KV
    # blocks small: a block is at least as large as a linear layer's state.
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 1,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "head_dim": 256,
}
_GEMMA4 = {
    "head_dim": 32,
    **_EXPERTS,
    "enable_moe_block": True,
    "hidden_size_per_layer_input": 0,
    **_SLIDING,
    "tie_word_embeddings": True,
}
_ARIA = {
    "head_dim": 32,
    "moe_num_experts": 16,
    "moe_num_shared_experts": 1,
    "intermediate_size": 64,
}
_LLAMA4 = {
    "head_dim": 32,
    "num_local_experts": 8,
    "num_experts_per_tok": 1,
    "intermediate_size": 64,
    "intermediate_size_mlp": 128,
    "interleave_moe_layer_step": 2,
    "attention_chunk_size": 8192,
    "attn_temperature_tuning": False,
    "use_qk_norm": False,
}

FAMILIES |= {
    "qwen2_moe": Family(
        "Qwen2Moe",
        settings={
            **_TWO_HEADS,
            **_EXPERTS,
            "shared_expert_intermediate_size": 64,
            "norm_topk_prob": False,
        },
    ),
    "granitemoe": Family("GraniteMoe", router=_GRANITE_ROUTER, settings=_GRANITE),
    "granitemoeshared": Family(
        "GraniteMoeShared",
        router=_GRANITE_ROUTER,
        settings={**_GRANITE, "shared_intermediate_size": 64},
    ),
    "granitemoehybrid": Family(
        "GraniteMoeHybrid",
        router=_GRANITE_ROUTER,
        settings={
            **_GRANITE,
            "shared_intermediate_size": 64,
            "layer_types": ["attention"] * 4,
            "position_embedding_type": "rope",
            "mamba_n_heads": 4,
            "mamba_d_head": 32,
            "mamba_d_state": 32,
            "mamba_n_groups": 1,
            "mamba_expand": 2,
            "mamba_chunk_size": 64,
        },
    ),
    "phimoe": Family(
        "Phimoe",
        router=("block_sparse_moe.gate", "mlp.router"),
        settings={
            **_TWO_HEADS,
            **_TWO_OF_EIGHT,
            "sliding_window": None,
            "attention_bias": True,
            "lm_head_bias": True,
        },
    ),
    "dots1": Family(
        "Dots1",
        settings={
            **_SHARED,
            "head_dim": 32,
            "routed_scaling_factor": 2.0,
            "sliding_window": None,
            # vLLM reads these from the published configurations.
            "moe_layer_freq": 1,
            "scoring_func": "sigmoid",
            "topk_method": "noaux_tc",
        },
        scores="sigmoid",
    ),
    "ernie4_5_moe": Family(
        "Ernie4_5_Moe",
        top_k="moe_k",
        settings={
            "head_dim": 32,
            "moe_num_experts": 16,
            "moe_intermediate_size": 64,
            "intermediate_size": 128,
            "moe_num_shared_experts": 1,
            "moe_layer_start_index": 1,
            "moe_layer_end_index": 3,
            "moe_layer_interval": 1,
            "use_bias": False,
        },
        scores="softmax",
        bias=(
            "mlp.moe_statics.e_score_correction_bias",
            "mlp.gate.moe_statics.e_score_correction_bias",
        ),
    ),
    "flex_olmo": Family(
        "FlexOlmo",
        settings={
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "intermediate_size": 64,
        },
    ),
    # From here on: not in transformers 4.57, or not on a CPU with v0.20.2.
    "llama4_text": Family(
        "Llama4",
        text=True,
        router=("feed_forward.router",),
        settings=_LLAMA4,
    ),
    "exaone_moe": Family(
        "ExaoneMoe",
        settings={
            "head_dim": 32,
            **_EXPERTS,
            # Positions are rotated in sliding layers only.
            **_SLIDING,
        },
        scores="sigmoid",
    ),
    "afmoe": Family(
        "Afmoe",
        router=("mlp.router.gate",),
        settings={
            "head_dim": 32,
            **_EXPERTS,
            "num_shared_experts": 1,
            "num_dense_layers": 1,
            "layer_types": ["full_attention"] * 4,
            # vLLM reads these from the published configurations; transformers has them fixed.
            "score_func": "sigmoid",
            "route_norm": True,
            "n_group": 1,
            "topk_group": 1,
        },
        scores="sigmoid",
        bias=("mlp.expert_bias",),
    ),
    "minimax_m2": Family(
        "MiniMaxM2",
        settings={
            "head_dim": 32,
            **_LOCAL,
            # vLLM reads these from the published configurations.
            "rotary_dim": 32,
            "scoring_func": "sigmoid",
            "use_routing_bias": True,
            "use_qk_norm": True,
        },
        scores="sigmoid",
        bias=("mlp.e_score_correction_bias",),
    ),
    "lfm2_moe": Family(
        "Lfm2Moe",
        router=("feed_forward.gate",),
        settings={
            # With more heads, vLLM's rows differ from those of transformers on a CPU.
            "num_attention_heads": 1,
            "num_key_value_heads": 1,
            **_EXPERTS,
            "num_dense_layers": 1,
            "layer_types": ["conv", "full_attention"] * 2,
        },
        scores="sigmoid",
        bias=("feed_forward.expert_bias",),
    ),
    "qwen3_next": Family("Qwen3Next", settings={**_EXPERTS, **_LINEAR}),
    "qwen3_5_moe_text": Family("Qwen3_5Moe", text=True, settings={**_EXPERTS, **_LINEAR}),
    "gemma4_text": Family(
        "Gemma4", text=True, router=("router.proj",), top_k="top_k_experts", settings=_GEMMA4
    ),
    "glm4_moe_lite": Family(
        "Glm4MoeLite",
        settings={**_SHARED, **_MLA, "q_lora_rank": 32},
        scores="sigmoid",
    ),
    "granitemoe_swa": Family("GraniteMoeSWA", router=_GRANITE_ROUTER, settings=_GRANITE),
    "hy_v3": Family(
        "HYV3",
        settings={
            "head_dim": 32,
            **_EXPERTS,
            # vLLM reads these from the published configurations.
            "first_k_dense_replace": 1,
            "expert_hidden_dim": 64,
            "route_norm": True,
            "qk_norm": True,
        },
        scores="sigmoid",
        bias=("mlp.e_score_correction_bias",),
    ),
    "llama4": Family(
        "Llama4",
        router=("feed_forward.router",),
        settings=_LLAMA4,
        layers="language_model.model.layers",
        vision={
            "hidden_size": 64,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "intermediate_size": 256,
            "vision_output_dim": 64,
            "image_size": 28,
            "projector_input_dim": 64,
            "projector_output_dim": 64,
        },
    ),
    "gemma4": Family(
        "Gemma4",
        router=("router.proj",),
        top_k="top_k_experts",
        settings=_GEMMA4,
        layers="model.language_model.layers",
        vision={**_TOWER, "num_key_value_heads": 2, "head_dim": 32},
    ),
    "glm4v_moe": Family(
        "Glm4vMoe",
        settings={
            **_SHARED,
            "head_dim": 32,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "mrope_section": [4, 2, 2],
                "partial_rotary_factor": 0.5,
            },
            "use_qk_norm": False,  # vLLM reads it from the published configurations
        },
        scores="sigmoid",
        layers="model.language_model.layers",
        vision={**_VISION},
    ),
    "laguna": Family(
        "Laguna",
        settings={"head_dim": 32, **_EXPERTS},
        scores="sigmoid",
        # vLLM does not read the bias by the name that transformers gives it. It stays zero.
        bias=(),
    ),
    "minimax": Family(
        "MiniMax",
        settings={"head_dim": 32, **_TWO_OF_EIGHT, "layer_types": ["full_attention"] * 4},
    ),
    "solar_open": Family(
        "SolarOpen",
        settings={
            "head_dim": 32,
            "n_routed_experts": 16,
            "n_shared_experts": 1,
            "n_group": 1,
            "topk_group": 1,
            "moe_intermediate_size": 32,
            "norm_topk_prob": True,
        },
        scores="sigmoid",
    ),
    "dbrx": Family(
        "Dbrx",
        router=("ffn.router.layer",),
        top_k="ffn_config.moe_top_k",
        settings={
            "d_model": 64,
            "n_heads": 2,
            "n_layers": 4,
            **_TWO_HEADS,
            "attn_config": {"kv_n_heads": 1, "clip_qkv": 8.0, "rope_theta": 10000.0},
            "ffn_config": {
                "ffn_hidden_size": 64,
                "moe_num_experts": 8,
                "moe_top_k": 2,
                "ffn_act_fn": {"name": "silu"},
            },
        },
        layers="transformer.blocks",
    ),
    "mimo_v2_flash": Family(
        "MiMoV2Flash",
        settings={
            "head_dim": 32,
            "v_head_dim": 32,
            "n_routed_experts": 16,
            "moe_intermediate_size": 64,
            "intermediate_size": 128,
            "layer_types": ["full_attention", "sliding_attention"] * 2,
            "sliding_window": 512,
            # vLLM reads these from the published configurations.
            "hybrid_layer_pattern": [0, 1, 0, 1],
            "moe_layer_freq": [0, 1, 1, 1],
            "layernorm_epsilon": 1e-5,
            "swa_head_dim": 32,
            "swa_v_head_dim": 32,
            "swa_num_attention_heads": 4,
            "swa_num_key_value_heads": 2,
            "sliding_window_size": 512,
            "scoring_func": "sigmoid",
            "topk_method": "noaux_tc",
            "add_full_attention_sink_bias": False,
            "add_swa_attention_sink_bias": False,
        },
        scores="sigmoid",
    ),
    "qwen3_vl_moe": Family(
        "Qwen3VLMoe",
        settings={
            "head_dim": 32,
            **_EXPERTS,
            "norm_topk_prob": True,
            "rope_scaling": {"rope_type": "default", "mrope_section": [6, 5, 5]},
        },
        layers="model.language_model.layers",
        vision={**_VISION, "deepstack_visual_indexes": [0], "num_position_embeddings": 64},
    ),
    "mellum": Family(
        "Mellum",
        settings={
            "head_dim": 32,
            "num_local_experts": 16,
            "moe_intermediate_size": 64,
            "intermediate_size": 128,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "mlp_layer_types": ["sparse"] * 4,
            "sliding_window": 512,
        },
    ),
    "cohere2_moe": Family(
        "Cohere2Moe",
        settings={
            "head_dim": 32,
            "num_experts": 16,
            "intermediate_size": 64,
            "tie_word_embeddings": True,
            "layer_types": ["full_attention"] * 4,
        },
    ),
    "aria": Family(
        "Aria",
        router=("mlp.router",),
        top_k="moe_topk",
        # Its configuration takes the dictionary of the text model by this name.
        settings={"model_type": "aria_text", **_ARIA},
        layers="model.language_model.layers",
        vision={**_TOWER, "image_size": 28, "patch_size": 14},
    ),
    "aria_text": Family(
        "AriaText",
        router=("mlp.router",),
        top_k="moe_topk",
        settings=_ARIA,
    ),
    "qwen3_5_moe": Family(
        "Qwen3_5Moe",
        settings={**_EXPERTS, **_LINEAR},
        layers="model.language_model.layers",
        vision={**_VISION, "num_position_embeddings": 64},
    ),
}


def find(owner: Any, names: Sequence[str]) -> Any:
    """What the first of these names is in a decoder layer or a configuration, None if none is
    there."""
    for name in names:
        try:
            return attrgetter(name)(owner)
        except AttributeError:
            continue
    return None
