# SPDX-License-Identifier: Apache-2.0
"""verl with VeOmni: the controller that its VeOmni engine gives targets to, and that the routers
ask in their forward passes. VeOmni itself is not installed: its model wants a GPU."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import torch
from driving import Turn
from verl.utils.veomni.router_replay import VeOmniRouterReplay

from examples import clients
from examples.client import Completion

NUM_EXPERTS = 300
# Behind the sequence, as the engine pads it.
PADDING = 5
PAGE = (Path(clients.__file__).parent / "README.md").read_text(encoding="utf-8")
RECIPE = re.findall(r"^## verl with VeOmni$.*?^```python\n(.*?)^```$", PAGE, re.M | re.S)[0]


def replay(turns: list[Turn]) -> list[tuple[list[int], Any]]:
    """verl takes the rows of the last turn for those of all turns."""
    return [replay_one(completion) for completion in turns[-1].completions()]


def replay_one(completion: Completion) -> tuple[list[int], Any]:
    tokens = [*completion.prompt, *completion.token_ids]
    names: dict[str, Any] = {"rows": completion.rows}
    exec(RECIPE, names)
    # As `_prepare_router_replay_inputs` does it. The last token has no row: verl leaves zeros.
    rows = torch.from_numpy(names["rows"].astype(np.int64))
    targets = torch.cat([rows, rows.new_zeros(1 + PADDING, *rows.shape[1:])])
    controller = VeOmniRouterReplay()
    controller.begin_replay()
    controller.begin_microbatch(targets=list(targets.unbind(dim=1)))

    torch.manual_seed(0)
    routes = np.zeros((len(tokens), *completion.rows.shape[1:]), dtype=np.int64)
    routers = [torch.nn.Identity() for _ in completion.moe_layers]
    for layer, router in zip(completion.moe_layers, routers, strict=True):
        scores = torch.rand(len(targets), NUM_EXPERTS)
        native = scores.topk(rows.shape[2]).indices
        taken = controller.on_router_forward(router, scores, native)
        assert (taken[len(tokens) - 1 :] == native[len(tokens) - 1 :]).all()
        routes[:, layer] = taken[: len(tokens)].numpy()
    assert controller.num_fired == controller.num_targets, "targets are those of other layers"
    return tokens, routes
