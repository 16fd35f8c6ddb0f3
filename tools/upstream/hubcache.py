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

_FILE = Path(__file__).with_name("hub.toml")  # which explains the tables
_DATA = tomllib.loads(_FILE.read_text(encoding="utf-8"))
STAND_INS: dict[str, dict[str, Any]] = _DATA["models"] | _DATA["configurations"]
# Every repository has one revision.
REVISION = "0" * 40


def recipe() -> str:
    """A digest of everything that decides what the stand-ins are."""
    return hashlib.sha256(Path(__file__).read_bytes() + _FILE.read_bytes()).hexdigest()


def make_hub(home: Path) -> Path:
    """Make the cache in ``home`` (the value for ``HF_HOME``), or leave the one of this recipe."""
    stamp = home / "recipe"
    if stamp.is_file() and stamp.read_text() == recipe():
        return home
    with staging(home) as made:
        for name in STAND_INS:
            repository = made / "hub" / f"models--{name.replace('/', '--')}"
            snapshot = repository / "snapshots" / REVISION
            snapshot.mkdir(parents=True)
            (repository / "refs").mkdir()
            (repository / "refs" / "main").write_text(REVISION)
            _write(snapshot, name)
        (made / "recipe").write_text(recipe())
        shutil.rmtree(home, ignore_errors=True)
        made.rename(home)
    return home


def _write(snapshot: Path, name: str) -> None:
    table = STAND_INS[name]
    architecture, model_type = table["type"]
    config = {
        "architectures": [architecture],
        "model_type": model_type,
        **(_DATA["tiny"] if table.get("weights") else {}),
        **(_DATA["quantized"] if table.get("quantized") else {}),
        **table.get("config", {}),
        **dict.fromkeys(table.get("null", ())),
    }
    files = {"config.json": config, **_tokenizer(table), **table.get("files", {})}
    if name in _DATA["configurations"]:
        files["generation_config.json"] = table.get("generation", {})
    for file, content in files.items():
        (snapshot / file).write_text(json.dumps(content, indent=1) + "\n")
    if table.get("weights"):
        _write_weights(snapshot)


def _tokenizer(table: dict[str, Any]) -> dict[str, Any]:
    """The files of a tokenizer with one token per byte, and the special tokens.

    The library would write them too, with a warning that names every id without a token.
    """
    from tokenizers import pre_tokenizers

    first, special = table.get("bytes_from", 1), table.get("special", {"<|endoftext|>": 0})
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: number for number, letter in enumerate(letters, first)} | special
    added = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    end = next(iter(special))
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    return {
        "tokenizer.json": {
            "version": "1.0",
            "added_tokens": [
                {"id": number, "content": token, **added, "special": True}
                for token, number in special.items()
            ],
            "pre_tokenizer": {**byte_level, "use_regex": True},
            "decoder": {**byte_level, "use_regex": True},
            "model": {"type": "BPE", "vocab": vocabulary, "merges": []},
        },
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            **{"eos_token": end, "pad_token": end, "chat_template": _DATA["chat_template"]},
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
