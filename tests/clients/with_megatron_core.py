# SPDX-License-Identifier: Apache-2.0
"""megatron-core: `TopKRouter` and `RouterReplay` on a CPU, one router for each MoE layer."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from driving import Turn, indented_block
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction
from megatron.core.transformer.transformer_config import TransformerConfig

from examples.client import Completion
from examples.clients import megatron_replay
from examples.clients.turns import join_turns

# Of every recorded model, or more.
NUM_EXPERTS = 300
# Behind the sequence, as batches have it.
PADDING = 5
# From `RouterReplay` and the function of the recipe to routers that replay.
RECIPE = indented_block(megatron_replay.__doc__)


def make_router(top_k: int) -> TopKRouter:
    config = TransformerConfig(
        num_layers=1,
        hidden_size=8,
        num_attention_heads=1,
        num_moe_experts=NUM_EXPERTS,
        moe_router_topk=top_k,
        moe_router_load_balancing_type="none",
        moe_enable_routing_replay=True,
        use_cpu_initialization=True,
    )
    groups = SimpleNamespace(tp=None, cp=None, tp_cp=None, tp_dp_cp=None)
    return TopKRouter(config, pg_collection=groups)


def replay(turns: list[Turn]) -> list[tuple[list[int], Any]]:
    """The choices of one turn, or several turns in one."""
    answered = [turn.completions() for turn in turns if not turn.aborted_at_once]
    if len(answered) > 1:
        answered = [[join_turns([turn[0] for turn in answered])]]
    return [replay_one(completion) for completion in answered[0]]


def replay_one(completion: Completion) -> tuple[list[int], Any]:
    tokens = [*completion.prompt, *completion.token_ids]
    length = len(tokens) + PADDING
    RouterReplay.clear_global_router_replay_instances()
    routers = [make_router(rows.shape[1]) for rows in completion.by_layer().values()]
    names = {
        "RouterReplay": RouterReplay,
        "RouterReplayAction": RouterReplayAction,
        "router_targets": megatron_replay.router_targets,
        "completion": completion,
        "length": length,
    }
    exec(RECIPE, names)

    layers, most = completion.rows.shape[1:]
    routes = np.zeros((len(tokens), layers, most), dtype=np.int64)
    torch.manual_seed(0)
    # A router's own linear layer wants a GPU.
    logits = torch.randn(length, 1, NUM_EXPERTS)
    for layer, router in zip(completion.moe_layers, routers, strict=True):
        probs, routing_map = router.routing(logits)
        # What the token dispatcher and the experts rely on.
        assert (routing_map.sum(dim=-1) == router.topk).all(), "a token has too few experts"
        torch.testing.assert_close(probs.sum(dim=-1), torch.ones(length))
        ids = routing_map.nonzero()[:, 1].view(length, router.topk)[: len(tokens)].numpy()
        routes[:, layer] = np.pad(ids, ((0, 0), (0, most - router.topk)), mode="edge")
    return tokens, routes
