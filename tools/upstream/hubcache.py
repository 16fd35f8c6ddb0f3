# SPDX-License-Identifier: Apache-2.0
"""A Hugging Face cache with stand-ins for the repositories that vLLM's tests name.

A stand-in has the repository's architecture in a configuration of our own, a byte-level tokenizer
and, where a test starts an engine, tiny random weights. Nothing of it is downloaded: with
``HF_HUB_OFFLINE=1`` a test finds the stand-in, or fails at once.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tools.common.files import digest_of, staging

END = "<|endoftext|>"
# Every repository has one revision.
REVISION = "0" * 40

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)


@dataclass(frozen=True)
class StandIn:
    """One repository: ``config.json`` and what else it has."""

    architecture: str
    model_type: str
    config: Mapping[str, Any] = field(default_factory=dict)
    weights: bool = False
    # Special tokens by id, the end of a text first, and the first of the 256 ids of bytes.
    special: Mapping[str, int] = field(default_factory=lambda: {END: 0})
    bytes_from: int = 1
    # Files beside configuration and tokenizer, by name.
    files: Mapping[str, Any] = field(default_factory=dict)


# A head of 32 is the smallest that vLLM's CPU attention takes.
_TINY = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "initializer_range": 0.1,
    "eos_token_id": 0,
}
_CLIP = {"image_size": 336, "patch_size": 14, "hidden_size": 1024, "num_hidden_layers": 24}
_LLAVA_IMAGES = {
    "image_processor_type": "CLIPImageProcessor",
    "processor_class": "LlavaProcessor",
    "size": {"shortest_edge": _CLIP["image_size"]},
    "crop_size": {"height": _CLIP["image_size"], "width": _CLIP["image_size"]},
}

STAND_INS: dict[str, StandIn] = {
    "facebook/opt-125m": StandIn(
        "OPTForCausalLM",
        "opt",
        # The stand-in's own ids: transformers' defaults are those of another tokenizer.
        {"torch_dtype": "float16", "eos_token_id": 0, "bos_token_id": 0, "pad_token_id": 0},
    ),
    "hmellor/tiny-random-LlamaForCausalLM": StandIn(
        "LlamaForCausalLM", "llama", {**_TINY, "max_position_embeddings": 8192}, weights=True
    ),
    "llava-hf/llava-1.5-7b-hf": StandIn(
        "LlavaForConditionalGeneration",
        "llava",
        {
            "image_token_index": 32000,
            "image_seq_length": (_CLIP["image_size"] // _CLIP["patch_size"]) ** 2,
            "vision_feature_layer": -2,
            "vision_feature_select_strategy": "default",
            "vision_config": {"model_type": "clip_vision_model", **_CLIP},
            "text_config": {
                "model_type": "llama",
                "architectures": ["LlamaForCausalLM"],
                "vocab_size": 32064,
                "max_position_embeddings": 4096,
            },
        },
        special={END: 0, "<image>": 32000},
        files={
            "preprocessor_config.json": _LLAVA_IMAGES,
            "processor_config.json": {
                "processor_class": "LlavaProcessor",
                "image_token": "<image>",
                "patch_size": _CLIP["patch_size"],
                "num_additional_image_tokens": 1,
                "vision_feature_select_strategy": "default",
            },
        },
    ),
    "meta-llama/Llama-3.2-1B": StandIn(
        "LlamaForCausalLM",
        "llama",
        {"max_position_embeddings": 131072, "vocab_size": 128256, "eos_token_id": 128001},
        special={"<|end_of_text|>": 128001, "<|eot_id|>": 128009},
        # Tests draw ids below the number of tokens, and fail when they draw one of the text's.
        bytes_from=1000,
    ),
    "Qwen/Qwen1.5-7B": StandIn("Qwen2ForCausalLM", "qwen2", {"max_position_embeddings": 32768}),
    "Qwen/Qwen3-0.6B": StandIn(
        "Qwen3ForCausalLM",
        "qwen3",
        {**_TINY, "max_position_embeddings": 40960, "torch_dtype": "bfloat16"},
        weights=True,
    ),
}

# Read as configurations alone, by tests/test_config.py: architecture, model type, and the fields
# that its tests look at.
_QUANTIZED = {
    "quantization_config": {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {"num_bits": 8, "type": "float", "strategy": "tensor"},
                "input_activations": {"num_bits": 8, "type": "float", "strategy": "tensor"},
            }
        },
        "ignore": ["lm_head"],
    }
}
_QWEN2_VL_VISION = {"model_type": "qwen2_vl", "depth": 32, "hidden_size": 1536}
_CONFIGURATIONS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-7B": (
        "Qwen2ForCausalLM",
        "qwen2",
        {"max_position_embeddings": 131072},
    ),
    "distilbert/distilgpt2": ("GPT2LMHeadModel", "gpt2", {}),
    "jason9693/Qwen2.5-1.5B-apeach": ("Qwen2ForSequenceClassification", "qwen2", {}),
    "lmsys/longchat-13b-16k": (
        "LlamaForCausalLM",
        "llama",
        {"max_position_embeddings": 2048, "rope_scaling": {"type": "linear", "factor": 8.0}},
    ),
    "meta-llama/Llama-3.2-1B-Instruct": ("LlamaForCausalLM", "llama", {}),
    "meta-llama/Meta-Llama-3-8B-Instruct": (
        "LlamaForCausalLM",
        "llama",
        {"max_position_embeddings": 8192, "rope_theta": 500000.0},
    ),
    "mistralai/Mistral-7B-Instruct-v0.2": (
        "MistralForCausalLM",
        "mistral",
        {"max_position_embeddings": 32768, "sliding_window": None},
    ),
    "mistralai/Mistral-7B-v0.1": (
        "MistralForCausalLM",
        "mistral",
        {"max_position_embeddings": 32768, "sliding_window": 4096},
    ),
    "mistralai/Mixtral-8x7B-Instruct-v0.1": ("MixtralForCausalLM", "mixtral", {}),
    "openai/whisper-small": ("WhisperForConditionalGeneration", "whisper", {}),
    "openai/whisper-tiny": ("WhisperForConditionalGeneration", "whisper", {}),
    "Qwen/Qwen2-VL-2B-Instruct": (
        "Qwen2VLForConditionalGeneration",
        "qwen2_vl",
        {
            "vision_config": _QWEN2_VL_VISION,
            "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
        },
    ),
    "Qwen/Qwen2.5-1.5B-Instruct": ("Qwen2ForCausalLM", "qwen2", {}),
    "Qwen/Qwen3-Next-80B-A3B-Instruct": ("Qwen3NextForCausalLM", "qwen3_next", {}),
    "RedHatAI/DeepSeek-V2.5-1210-FP8": ("DeepseekV2ForCausalLM", "deepseek_v2", _QUANTIZED),
    "RedHatAI/gpt-oss-20b": (
        "GptOssForCausalLM",
        "gpt_oss",
        {"quantization_config": {"quant_method": "mxfp4"}},
    ),
    "RedHatAI/Llama-3.1-8B-Instruct-NVFP4": ("LlamaForCausalLM", "llama", _QUANTIZED),
    "RedHatAI/Llama-3.2-1B-FP8": ("LlamaForCausalLM", "llama", _QUANTIZED),
    "RedHatAI/Llama-4-Scout-17B-16E-Instruct": (
        "Llama4ForConditionalGeneration",
        "llama4",
        {"text_config": {"model_type": "llama4_text"}},
    ),
    "RedHatAI/Mistral-Small-24B-Instruct-2501-quantized.w8a8": (
        "MistralForCausalLM",
        "mistral",
        _QUANTIZED,
    ),
    "RedHatAI/Mixtral-8x7B-Instruct-v0.1": ("MixtralForCausalLM", "mixtral", {}),
    "state-spaces/mamba-130m-hf": ("MambaForCausalLM", "mamba", {}),
}
_GENERATION = {
    "Qwen/Qwen2.5-1.5B-Instruct": {
        "repetition_penalty": 1.1,
        "temperature": 0.7,
        "top_p": 0.8,
        "top_k": 20,
    }
}
STAND_INS |= {
    name: StandIn(*parts, files={"generation_config.json": _GENERATION.get(name, {})})
    for name, parts in _CONFIGURATIONS.items()
}


def recipe() -> str:
    """A digest of everything that decides what the stand-ins are."""
    return digest_of(Path(__file__))


def make_hub(home: Path) -> Path:
    """Make the cache in ``home`` (the value for ``HF_HOME``), or leave the one of this recipe."""
    stamp = home / "recipe"
    if stamp.is_file() and stamp.read_text() == recipe():
        return home
    with staging(home) as made:
        for name, stand_in in STAND_INS.items():
            repository = made / "hub" / f"models--{name.replace('/', '--')}"
            snapshot = repository / "snapshots" / REVISION
            snapshot.mkdir(parents=True)
            (repository / "refs").mkdir()
            (repository / "refs" / "main").write_text(REVISION)
            _write(snapshot, stand_in)
        (made / "recipe").write_text(recipe())
        shutil.rmtree(home, ignore_errors=True)
        made.rename(home)
    return home


def _write(snapshot: Path, stand_in: StandIn) -> None:
    config = {
        "architectures": [stand_in.architecture],
        "model_type": stand_in.model_type,
        **stand_in.config,
    }
    files = {"config.json": config, **_tokenizer(stand_in), **stand_in.files}
    for name, content in files.items():
        (snapshot / name).write_text(json.dumps(content, indent=1) + "\n")
    if stand_in.weights:
        _write_weights(snapshot)


def _tokenizer(stand_in: StandIn) -> dict[str, Any]:
    """The files of a tokenizer with a token a byte, and the special ones."""
    from tokenizers import pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: stand_in.bytes_from + number for number, letter in enumerate(letters)}
    added = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    end = next(iter(stand_in.special))
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    return {
        "tokenizer.json": {
            "version": "1.0",
            "added_tokens": [
                {"id": number, "content": token, **added, "special": True}
                for token, number in stand_in.special.items()
            ],
            "pre_tokenizer": {**byte_level, "use_regex": True},
            "decoder": {**byte_level, "use_regex": True},
            "model": {"type": "BPE", "vocab": {**vocabulary, **stand_in.special}, "merges": []},
        },
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": end,
            "pad_token": end,
            "chat_template": CHAT_TEMPLATE,
        },
    }


def _write_weights(snapshot: Path) -> None:
    import torch
    import transformers

    config = transformers.AutoConfig.from_pretrained(snapshot)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config)
    model.save_pretrained(snapshot, safe_serialization=True)
