# SPDX-License-Identifier: Apache-2.0
"""Small random MoE checkpoints: real architectures, real safetensors, a local tokenizer.

Nothing is downloaded. `make_checkpoint` gives the same bytes for the same settings, and reuses a
checkpoint with these settings.

A family is one entry of `FAMILIES`: the classes in `transformers`, the small sizes, and
where its routers are (which `oracle.py` hooks).
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness import text

# Raised when what `make_checkpoint` writes changes, so that older checkpoints are remade.
RECIPE = 1
SETTINGS_FILE = "settings.json"
VOCAB_SIZE = 768
END, BEGIN_TURN, END_TURN, PAD = "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>"

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

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


@dataclass(frozen=True)
class Family:
    """What differs between model families.

    Attributes:
        config: configuration class in `transformers`.
        model: causal-LM class in `transformers`.
        router: a router's name inside its decoder layer, `model.layers.<i>.<router>`.
        experts: configuration field that counts the routed experts.
        settings: configuration fields on top of `COMMON`.
        top_k: configuration field of the top-k, a number or one for each layer.
        scores: what the router chooses its top-k by: "logits" (softmax does not change
            their order) or "sigmoid" (of the logits, plus a correction bias if it has one).
        router_std: standard deviation of the routers' weights; 0.5 spreads logits to +-4.
        dtype: dtype of the saved weights.
    """

    config: str
    model: str
    router: str
    experts: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    top_k: str = "num_experts_per_tok"
    scores: str = "logits"
    router_std: float = 0.5
    dtype: str = "float32"


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

FAMILIES: dict[str, Family] = {
    "qwen3_moe": Family(
        config="Qwen3MoeConfig",
        model="Qwen3MoeForCausalLM",
        router="mlp.gate",
        experts="num_experts",
        settings={
            "head_dim": 32,
            "num_experts": 16,
            "moe_intermediate_size": 64,
            "intermediate_size": 128,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "norm_topk_prob": True,
        },
    ),
    "mixtral": Family(
        config="MixtralConfig",
        model="MixtralForCausalLM",
        router="block_sparse_moe.gate",
        experts="num_local_experts",
        settings={
            "head_dim": 32,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "intermediate_size": 64,
            "sliding_window": None,
        },
    ),
    "olmoe": Family(
        config="OlmoeConfig",
        model="OlmoeForCausalLM",
        router="mlp.gate",
        experts="num_experts",
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
        config="Glm4MoeConfig",
        model="Glm4MoeForCausalLM",
        router="mlp.gate",
        experts="n_routed_experts",
        settings={**_SHARED, "head_dim": 32, "use_qk_norm": True},
        scores="sigmoid",
        # Less spread: float32 sigmoids of large logits round to ties.
        router_std=0.125,
    ),
    "deepseek_v2": Family(
        config="DeepseekV2Config",
        model="DeepseekV2ForCausalLM",
        router="mlp.gate",
        experts="n_routed_experts",
        settings={**_SHARED, **_MLA, "topk_method": "greedy", "norm_topk_prob": False},
    ),
    "deepseek_v3": Family(
        config="DeepseekV3Config",
        model="DeepseekV3ForCausalLM",
        router="mlp.gate",
        experts="n_routed_experts",
        # transformers' class has no other method; vLLM reads it from the configuration.
        settings={**_SHARED, **_MLA, "topk_method": "noaux_tc", "scoring_func": "sigmoid"},
        scores="sigmoid",
        router_std=0.125,
    ),
    "gpt_oss": Family(
        config="GptOssConfig",
        model="GptOssForCausalLM",
        router="mlp.router",
        experts="num_local_experts",
        settings={
            "head_dim": 32,
            "num_local_experts": 16,
            "intermediate_size": 64,
            "sliding_window": 128,
            "max_position_embeddings": 131072,  # what its default rope_scaling makes of 4096
        },
        dtype="bfloat16",  # the only one vLLM's CPU kernels take; no float32 oracle fits
    ),
    "hunyuan_v1_moe": Family(
        config="HunYuanMoEV1Config",
        model="HunYuanMoEV1ForCausalLM",
        router="mlp.gate.wg",
        experts="num_experts",
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


def make_checkpoint(
    path: Path | str,
    family: str = "qwen3_moe",
    *,
    seed: int = 0,
    router_std: float | None = None,
    dtype: str | None = None,
    **overrides: Any,
) -> Path:
    """Make a random checkpoint at `path`, or reuse the one there if it is the same.

    Args:
        path: folder of the checkpoint. It is replaced if its settings differ, and all
            at once: another process never sees half of one.
        family: a key of `FAMILIES`.
        seed: of all weights.
        router_std: standard deviation of the routers' weights instead of the family's.
        dtype: of the saved weights instead of the family's.
        **overrides: fields of the family's configuration class, for example
            `mlp_only_layers=[1]` for a dense layer in Qwen3-MoE.

    Returns:
        `path`, holding `config.json`, `model.safetensors`, the tokenizer's files and
        `settings.json`.

    Raises:
        ValueError: an unknown family or field, or a folder that holds something else.
    """
    path = Path(path)
    if family not in FAMILIES:
        raise ValueError(f"unknown model family {family!r}: one of {', '.join(FAMILIES)}")
    spec = FAMILIES[family]
    settings = {
        "recipe": RECIPE,
        "family": family,
        "seed": seed,
        "router_std": spec.router_std if router_std is None else router_std,
        "dtype": dtype or spec.dtype,
        "config": {**COMMON, spec.top_k: TOP_K, **spec.settings, **overrides},
        "text": hashlib.sha256("".join(text.corpus()).encode()).hexdigest(),
        # Another torch may draw other numbers, another transformers other field names.
        "made_with": {p: importlib.metadata.version(p) for p in ("torch", "transformers")},
    }
    if _is_made_of(path, settings):
        return path
    ours = (path / SETTINGS_FILE).is_file()
    if path.exists() and not ours and not (path.is_dir() and not any(path.iterdir())):
        raise ValueError(f"{path} is there and is no checkpoint of this demo; it is left alone")

    path.parent.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}-"))
    try:
        _write_model(made, spec, settings)
        _write_tokenizer(made)
        files = {f.name: _sha256(f) for f in sorted(made.iterdir())}
        record = {"settings": settings, "files": files}
        (made / SETTINGS_FILE).write_text(json.dumps(record, indent=1, sort_keys=True) + "\n")
        # mkdtemp and safetensors write for their owner alone; a server may run as another.
        made.chmod(0o755)
        for file in made.iterdir():
            file.chmod(0o644)
        if path.exists():
            shutil.rmtree(path)
        os.replace(made, path)
    finally:
        shutil.rmtree(made, ignore_errors=True)
    return path


def family_of(checkpoint: Path | str) -> Family:
    """The family of a checkpoint made by `make_checkpoint`, read from its `config.json`.

    Raises:
        ValueError: no checkpoint there, or of a family that the table does not have.
    """
    try:
        model_type = json.loads((Path(checkpoint) / "config.json").read_text())["model_type"]
    except (OSError, ValueError, KeyError) as e:
        raise ValueError(f"{checkpoint} is no readable checkpoint: {e}") from e
    if model_type not in FAMILIES:
        raise ValueError(f"{checkpoint} has model type {model_type!r}, which is not in FAMILIES")
    return FAMILIES[model_type]


def _is_made_of(path: Path, settings: Mapping[str, Any]) -> bool:
    """Whether `path` holds an undamaged checkpoint of these settings."""
    try:
        record = json.loads((path / SETTINGS_FILE).read_text())
        return record["settings"] == settings and all(
            _sha256(path / name) == digest for name, digest in record["files"].items()
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def _sha256(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def _write_model(path: Path, spec: Family, settings: Mapping[str, Any]) -> None:
    # Imported here: a run that reuses its checkpoint need not wait for torch.
    import torch
    import transformers

    config_class = getattr(transformers, spec.config)
    # Fields of the table are known too: some are read by models, not by the configuration class.
    known = {*vars(config_class()), *COMMON, *spec.settings}
    unknown = [k for k in settings["config"] if k not in known]
    if unknown:
        raise ValueError(f"{spec.config} has no field {', '.join(unknown)}")
    config = config_class(**settings["config"], bos_token_id=None, eos_token_id=0, pad_token_id=3)

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings["seed"])
        model = getattr(transformers, spec.model)(config).float()
        with torch.no_grad():
            for name, router in model.named_modules():
                if not name.endswith("." + spec.router):
                    continue
                router.weight.normal_(std=settings["router_std"])
                # A zero bias would not show whether the router uses it.
                bias = getattr(router, "e_score_correction_bias", None)
                if bias is not None:
                    bias.uniform_(-0.05, 0.05)
    model.to(getattr(torch, settings["dtype"]))
    model.generation_config = transformers.GenerationConfig(eos_token_id=0, pad_token_id=3)
    transformers.utils.logging.disable_progress_bar()
    model.save_pretrained(path, safe_serialization=True)


def _write_tokenizer(path: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        # Their ids are 0 to 3, in this order: the configuration of the model uses them.
        special_tokens=[END, BEGIN_TURN, END_TURN, PAD],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(text.corpus(), trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END,
        pad_token=PAD,
        model_max_length=COMMON["max_position_embeddings"],
        additional_special_tokens=[BEGIN_TURN, END_TURN],
    )
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(path)
