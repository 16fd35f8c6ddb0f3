# SPDX-License-Identifier: Apache-2.0
"""Which MoE families that `transformers` and a line share run on a CPU.

`test_all_families.py` of each line tests them. `docs/features.md` says why the others do not run.
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
