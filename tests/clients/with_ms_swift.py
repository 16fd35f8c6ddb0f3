# SPDX-License-Identifier: Apache-2.0
"""ms-swift: a choice of its rollout answer, over the wire of its server mode, into a sample and the
batch that its Megatron trainer replays."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from driving import Turn
from pydantic import TypeAdapter
from swift.infer_engine.protocol import (
    ChatCompletionResponse,
    ChatCompletionResponseChoice,
    ChatMessage,
    RolloutOutput,
    UsageInfo,
)
from swift.rl_core.data import OnPolicySample
from swift.rlhf_trainers.utils import build_routed_experts_batch

TEMPLATE = SimpleNamespace(padding_side="right", padding_free=False)
PADDING = 5


def replay(turns: list[Turn]) -> list[tuple[list[int], Any]]:
    # A rollout has one array: that of its last turn.
    return [replay_one(completion) for completion in turns[-1].completions()]


def replay_one(completion: Any) -> tuple[list[int], Any]:
    choice = ChatCompletionResponseChoice(
        index=0,
        message=ChatMessage(role="assistant", content=""),
        finish_reason=completion.finish_reason,
        token_ids=list(completion.token_ids),
        routed_experts=completion.rows,
    )
    usage = UsageInfo(prompt_tokens=0, completion_tokens=0, total_tokens=0)
    response = ChatCompletionResponse(model="model", choices=[choice], usage=usage)
    wire = TypeAdapter(RolloutOutput)
    output = wire.validate_json(wire.dump_json(RolloutOutput(response=response)))

    tokens = [*completion.prompt, *completion.token_ids]
    sample = OnPolicySample(messages=[{"role": "user", "content": ""}])
    sample.apply_rollout_output(rollout_output=output)
    sample.encoded = {"length": len(tokens)}
    (routes,) = build_routed_experts_batch(
        [sample],
        seq_lengths=torch.tensor([len(tokens)]),
        max_seq_len=len(tokens) + PADDING,
        template=TEMPLATE,
        device=torch.device("cpu"),
        router_replay_mode="R3",
    )
    return tokens, routes[: len(tokens)].numpy()
