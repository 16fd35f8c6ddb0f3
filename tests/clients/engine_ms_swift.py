# SPDX-License-Identifier: Apache-2.0
"""ms-swift's rollout engine, `GRPOVllmEngine`, around the vLLM of this environment."""

from __future__ import annotations

import random
import string
from collections.abc import Iterable, Iterator
from types import SimpleNamespace
from typing import Any

from driving import BEHAVIOURS, SETTINGS, Turn, make_turn


def roll_out(checkpoint: str) -> Iterator[tuple[str, Iterable[Turn]]]:
    import torch
    from swift.infer_engine import InferRequest, RequestConfig
    from swift.infer_engine.grpo_vllm_engine import GRPOVllmEngine

    swift = GRPOVllmEngine(
        checkpoint,
        model_type="qwen3_moe",
        template_type="dummy",
        torch_dtype=torch.float32,
        enforce_eager=True,
        max_model_len=1024,
        max_num_seqs=8,
        # The flag is what `--router_replay_mode R3` sets (megatron/trainers/rollout_mixin.py).
        engine_kwargs={**SETTINGS, "enable_return_routed_experts": True},
    )
    rng = random.Random(0)

    def say(length: int) -> str:
        return "".join(rng.choices(string.ascii_lowercase + " ", k=length))

    def send(said: str, **config: Any) -> Turn:
        request = InferRequest(messages=[{"role": "user", "content": said}])
        config = {"max_tokens": 9, "temperature": 0.0, "return_details": True, **config}
        (output,) = swift.infer([request], RequestConfig(**config), use_tqdm=False)
        return make_turn(
            output.response.prompt_token_ids,
            [(c.token_ids, c.routed_experts, c.finish_reason) for c in output.response.choices],
        )

    for behaviour in ("one turn", "n > 1", "prefix-cache hit"):
        yield behaviour, BEHAVIOURS[behaviour](SimpleNamespace(say=say, send=send))
