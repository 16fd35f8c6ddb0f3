# SPDX-License-Identifier: Apache-2.0
"""Route replay in megatron-core (tried with 0.16.1): `moe_enable_routing_replay=True` in the
`TransformerConfig`, then for each micro-batch of one sequence

    RouterReplay.set_replay_data(router_targets(completion, length))
    RouterReplay.set_global_router_replay_action(RouterReplayAction.REPLAY_FORWARD)

With several sequences, concatenate the targets of each router along the tokens, in the order in
which the model gets them. A pipeline stage takes the targets of its own layers.
"""

from __future__ import annotations

import torch

from examples.client import Completion


def router_targets(completion: Completion, length: int) -> list[torch.Tensor]:
    """What each router selects: megatron-core makes one `RouterReplay` for each MoE layer. Returns
    (T, k) int32 of distinct ids for each of `completion.moe_layers`. T counts the tokens of the
    sequence with its padding; k is the layer's own top-k. The last sampled token and padding have
    no row: they get experts 0 to k - 1. No token that is trained depends on them. Raises
    ValueError if rows are missing."""
    if (
        completion.start != 0
        or len(completion.rows) != len(completion.prompt) + len(completion.token_ids) - 1
    ):
        raise ValueError(
            f"the completion has {len(completion.rows)} rows from position {completion.start}; "
            f"wanted one for each token but the last one"
        )
    targets = []
    for rows in completion.by_layer().values():
        target = torch.arange(rows.shape[1], dtype=torch.int32).repeat(length, 1)
        target[: len(rows)] = torch.from_numpy(rows.astype("int32"))
        targets.append(target)
    return targets
