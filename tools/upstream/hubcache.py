# SPDX-License-Identifier: Apache-2.0
"""A Hugging Face cache with stand-ins for the repositories that vLLM's tests name.

A stand-in has the repository's architecture in a configuration of our own, a byte-level tokenizer
and, where a test starts an engine, tiny random weights. Nothing of it is downloaded: with
``HF_HUB_OFFLINE=1`` a test finds the stand-in, or fails at once.
"""

import hashlib
import json
import shutil
import tomllib
from pathlib import Path
from typing import Any

from tools.common.files import staging

_DATA = Path(__file__).with_name("hub.toml")  # which explains the tables
# Every repository has one revision.
REVISION = "0" * 40

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)
# A head of 32 is the smallest that vLLM's CPU attention takes.
_TINY = {
    **{"vocab_size": 512, "hidden_size": 128, "intermediate_size": 128, "head_dim": 32},
    **{"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4},
    **{"initializer_range": 0.1, "eos_token_id": 0},
}
_TENSORS = {"num_bits": 8, "type": "float", "strategy": "tensor"}
_GROUP = {"targets": ["Linear"], "weights": _TENSORS, "input_activations": _TENSORS}
_QUANTIZED = {
    "quantization_config": {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {"group_0": _GROUP},
        "ignore": ["lm_head"],
    }
}


def _read() -> dict[str, dict[str, Any]]:
    """The tables of ``hub.toml``, by repository."""
    data = tomllib.loads(_DATA.read_text(encoding="utf-8"))
    for table in data["configurations"].values():
        table["files"] = {"generation_config.json": table.get("generation", {})}
    return {**data["models"], **data["configurations"]}


STAND_INS = _read()


def recipe() -> str:
    """A digest of everything that decides what the stand-ins are."""
    return hashlib.sha256(Path(__file__).read_bytes() + _DATA.read_bytes()).hexdigest()


def make_hub(home: Path) -> Path:
    """Make the cache in ``home`` (the value for ``HF_HOME``), or leave the one of this recipe."""
    stamp = home / "recipe"
    if stamp.is_file() and stamp.read_text() == recipe():
        return home
    with staging(home) as made:
        for name, table in STAND_INS.items():
            repository = made / "hub" / f"models--{name.replace('/', '--')}"
            snapshot = repository / "snapshots" / REVISION
            snapshot.mkdir(parents=True)
            (repository / "refs").mkdir()
            (repository / "refs" / "main").write_text(REVISION)
            _write(snapshot, table)
        (made / "recipe").write_text(recipe())
        shutil.rmtree(home, ignore_errors=True)
        made.rename(home)
    return home


def _write(snapshot: Path, table: dict[str, Any]) -> None:
    architecture, model_type = table["type"]
    special = table.get("special", {"<|endoftext|>": 0})
    end = next(iter(special))
    config = {
        "architectures": [architecture],
        "model_type": model_type,
        **(_TINY if table.get("weights") else {}),
        **(_QUANTIZED if table.get("quantized") else {}),
        **table.get("config", {}),
        **dict.fromkeys(table.get("null", ())),
    }
    tokenizer = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": CHAT_TEMPLATE}
    tokenizer |= {"eos_token": end, "pad_token": end}
    files = {"config.json": config, "tokenizer_config.json": tokenizer, **table.get("files", {})}
    for name, content in files.items():
        (snapshot / name).write_text(json.dumps(content, indent=1) + "\n")
    _write_tokenizer(snapshot, special, table.get("bytes_from", 1))
    if table.get("weights"):
        _write_weights(snapshot)


def _write_tokenizer(snapshot: Path, special: dict[str, int], first: int) -> None:
    """A tokenizer with one token per byte, beginning at the id ``first``, and special tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: number for number, letter in enumerate(letters, first)}
    tokenizer = Tokenizer(models.BPE(vocabulary | special, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=True)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(special))
    tokenizer.save(str(snapshot / "tokenizer.json"))


def _write_weights(snapshot: Path) -> None:
    import torch
    import transformers

    config = transformers.AutoConfig.from_pretrained(snapshot)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config)
    model.save_pretrained(snapshot, safe_serialization=True)
