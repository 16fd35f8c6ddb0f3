# SPDX-License-Identifier: Apache-2.0
"""ms-swift's rollout engine, `GRPOVllmEngine`, around the vLLM of this environment."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from driving import ENGINE, Turn, make_turn, run_engine

SAID = "The harbour is quiet before sunrise, and the boats wait for the tide to turn again. "
MORE = "Then the wind rises."


def roll_out(checkpoint: str) -> Iterator[tuple[str, list[Turn]]]:
    import torch
    from swift.infer_engine import InferRequest, RequestConfig
    from swift.infer_engine.grpo_vllm_engine import GRPOVllmEngine

    engine = GRPOVllmEngine(
        checkpoint,
        model_type="qwen3_moe",
        template_type="dummy",
        torch_dtype=torch.float32,
        enforce_eager=True,
        max_model_len=1024,
        max_num_seqs=8,
        # The flag is what `--router_replay_mode R3` sets (megatron/trainers/rollout_mixin.py).
        engine_kwargs={**ENGINE, "enable_return_routed_experts": True},
    )

    def ask(said: str, **config: Any) -> Turn:
        request = InferRequest(messages=[{"role": "user", "content": said}])
        config = {"max_tokens": 9, "temperature": 0.0, "return_details": True, **config}
        (output,) = engine.infer([request], RequestConfig(**config), use_tqdm=False)
        return make_turn(
            output.response.prompt_token_ids,
            [(c.token_ids, c.routed_experts, c.finish_reason) for c in output.response.choices],
        )

    yield "one turn", [ask(SAID * 5)]
    yield "prefix-cache hit", [ask(SAID * 5 + MORE)]
    yield "n > 1", [ask(SAID * 7, n=4, temperature=1.0, seed=7)]


if __name__ == "__main__":
    run_engine(roll_out)
