# SPDX-License-Identifier: Apache-2.0
"""Small random MoE checkpoints: real architectures, real safetensors, a local tokenizer.

Nothing is downloaded. `make_checkpoint` gives the same bytes for the same settings, and reuses a
checkpoint with these settings.

The families are those of `families.py`.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from harness import text
from harness.families import COMMON, FAMILIES, TOP_K, VOCAB_SIZE, Family, find

# Raised when what `make_checkpoint` writes changes, so that older checkpoints are remade.
RECIPE = 1
SETTINGS_FILE = "settings.json"
END = "<|endoftext|>"
BEGIN_TURN = "<|im_start|>"
END_TURN = "<|im_end|>"
PAD = "<|pad|>"

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def make_checkpoint(
    path: Path | str,
    family: str = "qwen3_moe",
    *,
    seed: int = 0,
    router_std: float | None = None,
    dtype: str | None = None,
    **overrides: Any,
) -> Path:
    """Make a random checkpoint of a family at `path`, or reuse the one there if it has the same
    settings. Another process never sees half of one. `overrides` are fields of the family's
    configuration class: `mlp_only_layers=[1]` makes a dense layer in Qwen3-MoE. Raises ValueError
    for an unknown family or field, or a folder that holds something else."""
    path = Path(path)
    if family not in FAMILIES:
        raise ValueError(f"unknown model family {family!r}: one of {', '.join(FAMILIES)}")
    spec = FAMILIES[family]
    # A configuration within the configuration has its own.
    top_k = {} if "." in spec.top_k else {spec.top_k: TOP_K}
    settings = {
        "recipe": RECIPE,
        "family": family,
        "seed": seed,
        "router_std": spec.router_std if router_std is None else router_std,
        "dtype": dtype or spec.dtype,
        "config": {**COMMON, **top_k, **spec.settings, **overrides},
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
    """The family of a checkpoint of `make_checkpoint`, read from its `config.json`. Raises
    ValueError if there is none."""
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
    known = {*vars(config_class().get_text_config()), *COMMON, *spec.settings}
    unknown = [k for k in settings["config"] if k not in known]
    if unknown:
        raise ValueError(f"{spec.config} has no field {', '.join(unknown)}")
    text_config = {**settings["config"], "bos_token_id": None, "eos_token_id": 0, "pad_token_id": 3}
    if spec.vision is None:
        config = config_class(**text_config)
    else:
        config = config_class(text_config=text_config, vision_config=dict(spec.vision))

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings["seed"])
        model = getattr(transformers, spec.model)(config).float()
        with torch.no_grad():
            for layer in model.get_submodule(spec.layers):
                router = find(layer, spec.router)
                if router is None:
                    continue
                router.weight.normal_(std=settings["router_std"])
                # A zero bias would not show whether the router uses it.
                bias = find(layer, spec.bias)
                if bias is not None:
                    bias.uniform_(-0.05, 0.05)
    model.to(getattr(torch, settings["dtype"]))
    model.generation_config = transformers.GenerationConfig(eos_token_id=0, pad_token_id=3)
    transformers.utils.logging.disable_progress_bar()
    model.save_pretrained(path, safe_serialization=True)
    if architectures := settings["config"].get("architectures"):
        # Published configurations may have another name than the class in transformers.
        file = path / "config.json"
        saved = {**json.loads(file.read_text()), "architectures": architectures}
        file.write_text(json.dumps(saved, indent=2) + "\n")


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
