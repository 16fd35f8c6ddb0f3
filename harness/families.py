# SPDX-License-Identifier: Apache-2.0
"""Families of MoE models: classes in `transformers`, small sizes, and where the routers are.

`families.toml` has the table. `checkpoint.py` makes checkpoints, `oracle.py` hooks the routers.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
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
    """What differs between model families. Of several names, the first one that is there counts:
    releases of `transformers` differ."""

    name: str  # with which its classes in `transformers` begin
    router: tuple[str, ...] = ("mlp.gate",)  # inside its decoder layer
    settings: Mapping[str, Any] = field(default_factory=dict)  # on top of `COMMON`
    top_k: str = "num_experts_per_tok"  # field: a number, or one for each layer
    scores: str = "logits"  # or "softmax" or "sigmoid" of them; softmax keeps their order
    bias: tuple[str, ...] = ("mlp.gate.e_score_correction_bias",)
    dtype: str = "float32"
    layers: str = "model.layers"  # the list of decoder layers
    text: bool = False  # the text model of a family with a vision tower
    vision: Mapping[str, Any] | None = None  # `settings` are then the text model's

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


def _settings(table: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that a table uses, its own on top, and those without a value."""
    found: dict[str, Any] = {}
    for name in table.get("use", ()):
        found |= _settings(_DATA["shared_settings"][name])
    found |= {name: value for name, value in table.items() if name not in ("use", "null")}
    return found | dict.fromkeys(table.get("null", ()))


def _read(table: dict[str, Any]) -> Family:
    used = {name: table.pop(name) for name in ("use", "null") if name in table}
    table["settings"] = _settings({**table.get("settings", {}), **used})
    if "vision" in table:
        table["vision"] = _settings(table["vision"])
    tuples = {name: tuple(table[name]) for name in ("router", "bias") if name in table}
    return Family(**{**table, **tuples})


_DATA = tomllib.loads(Path(__file__).with_name("families.toml").read_text(encoding="utf-8"))
FAMILIES = {name: _read(table) for name, table in _DATA["families"].items()}


def find(owner: Any, names: Sequence[str]) -> Any:
    """What the first of these names is in a decoder layer or a configuration, None if none is
    there."""
    for name in names:
        try:
            return attrgetter(name)(owner)
        except AttributeError:
            continue
    return None
