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
    "qwen2_moe": {"mlp_only_layers": [2]},
    "qwen3_moe": {"mlp_only_layers": [2]},
}

# By line and family: fields of the configuration on top of the fields in `families.py`.
TESTED: dict[str, dict[str, dict[str, Any]]] = {
    "v0.20.2": {**_BOTH, "llama4_text": {}},
    "v0.33.0": {
        **_BOTH,
        "afmoe": {},
        "cohere2_moe": {},
        "exaone_moe": {},
        "gemma4_text": {},
        "granitemoe_swa": {},
        "hy_v3": {},
        "lfm2_moe": {},
        "llama4": {},
        "llama4_text": {},
        "mellum": {},
        "minimax_m2": {},
        "phimoe": {},
    },
}

_OWN_LOGITS = "by its own logits (`test_families.py`)"

# By line and family: why it is not in `TESTED`.
NOT_TESTED: dict[str, dict[str, str]] = {
    "v0.20.2": {
        "deepseek_v2": _OWN_LOGITS,
        "deepseek_v3": _OWN_LOGITS,
        "gpt_oss": _OWN_LOGITS,
    },
    "v0.33.0": {
        "phimoe": "no: without rows too, vLLM raises `too many values to unpack (expected 3)`",
    },
}
