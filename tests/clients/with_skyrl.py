# SPDX-License-Identifier: Apache-2.0
"""SkyRL: what its server packs, what its client unpacks, the trace of a trajectory, and the batch
of its Megatron trainer."""

from __future__ import annotations

from typing import Any

import numpy as np
import orjson
from driving import Turn
from skyrl.backends.skyrl_train.inference_servers.generate_wire import (
    decode_packed_routed_experts,
    load_packed_body,
    pack_routed_experts,
)
from skyrl.backends.skyrl_train.utils.routed_experts import RoutedExpertTrace
from skyrl.train.dataset.preprocess import _collate_rollout_expert_indices

from examples.client import Completion


def replay(turns: list[Turn]) -> list[tuple[list[int], Any]]:
    conversations = zip(*(turn.completions() for turn in turns), strict=True)
    return [replay_one(conversation) for conversation in conversations]


def replay_one(conversation: tuple[Completion, ...]) -> tuple[list[int], Any]:
    trace = RoutedExpertTrace()
    for turn, completion in enumerate(conversation):
        # What the generator asks for, which is what was recorded.
        assert completion.start == trace.prompt_start, turn
        body = {"choices": [{"routed_experts": pack_routed_experts(completion.rows)}]}
        (choice,) = load_packed_body(orjson.dumps(body))["choices"]
        trace.record_generation(
            prompt_token_count=len(completion.prompt),
            generated_token_count=len(completion.token_ids),
            routed_experts=decode_packed_routed_experts(choice["routed_experts"]),
        )
    tokens = [*completion.prompt, *completion.token_ids]
    sampled = [0] * len(completion.prompt) + [1] * len(completion.token_ids)
    rows = trace.finalize(token_count=len(tokens), loss_mask=sampled)
    packed = _collate_rollout_expert_indices([rows], np.array([len(tokens)]))
    return tokens, packed.values.numpy()
