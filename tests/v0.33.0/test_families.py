# SPDX-License-Identifier: Apache-2.0
"""Families whose rows need another oracle on this line than the routers of `transformers`: the
router logits of the same forward.

| family | why |
|---|---|
| gpt-oss, Qwen3.5-MoE | the CPU kernels take bfloat16 only |
| DeepSeek-V2 and V3, GLM-4.7-Flash | multi-head latent attention on a CPU differs from
  `transformers` |
| MiMo-V2-Flash | vLLM's forward pass differs from `transformers`, with the flag off too |
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from harness.choice import Choice
from harness.engine_v0_33_0 import OPTIONS
from tests.behaviour.conftest import environment  # noqa: F401
from tests.behaviour.test_families import (  # noqa: F401
    BY_OWN_LOGITS,
    GROUPED,
    Case,
    Served,
    serving,
    test_rows_are_what_the_logits_of_the_same_forward_choose,
    test_rows_of_own_logits_have_the_form_of_the_model,
)

pytestmark = pytest.mark.slow

# The sizes of the reference kernel, which every CPU has.
LATENT: dict[str, Any] = {
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
}
REFERENCE = {"attention_config": {"backend": "CPU_MLA"}}
SIGMOID = Choice(top_k=4, scoring="sigmoid")

CASES = {
    "gpt_oss": BY_OWN_LOGITS["gpt_oss"],
    "qwen3_5_moe_text": Case("qwen3_5_moe_text", options={"dtype": "bfloat16"}),
    "qwen3_5_moe": Case(
        "qwen3_5_moe",
        # The checkpoint has no image processor.
        options={"dtype": "bfloat16", "limit_mm_per_prompt": {"image": 0, "video": 0}},
    ),
    "deepseek_v2": Case(
        "deepseek_v2",
        {**LATENT, **GROUPED, "topk_method": "group_limited_greedy"},
        REFERENCE,
        moe_layers=(1, 2, 3),
        choice=Choice(top_k=4, groups=4, top_groups=2),
    ),
    "deepseek_v3": Case(
        "deepseek_v3",
        {**LATENT, **GROUPED},
        REFERENCE,
        moe_layers=(1, 2, 3),
        choice=Choice(top_k=4, groups=4, top_groups=2, scoring="sigmoid"),
    ),
    "mimo_v2_flash": Case("mimo_v2_flash", moe_layers=(1, 2, 3), choice=SIGMOID),
    "glm4_moe_lite": Case("glm4_moe_lite", LATENT, REFERENCE, moe_layers=(1, 2, 3), choice=SIGMOID),
}


@pytest.fixture(scope="module", params=CASES)
def recorded(request: pytest.FixtureRequest, checkpoint: Callable[..., Path]) -> Iterator[Served]:
    options = {**OPTIONS, "worker_extension_cls": "harness.recorder.Recorder"}
    with serving(CASES[request.param], checkpoint, **options) as served:
        served.llm.collective_rpc("record_start")
        yield served
