# SPDX-License-Identifier: Apache-2.0
"""The independent oracle of the experts' weights: what Hugging Face `transformers` multiplies each
expert with, as its MoE layers call their experts. Nothing of vLLM takes part."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from harness import oracle
from harness.checkpoint import family_of
from harness.families import find

# Two float32 implementations add in different orders, also of the layers before.
CLOSE = 1e-5
# One family for each way of weighing: its overrides, and the factor that vLLM multiplies the output
# with instead of the weights.
WAYS: dict[str, tuple[dict[str, Any], float]] = {
    # softmax of all experts, or of the chosen ones
    "qwen3_moe": ({"mlp_only_layers": [1]}, 1.0),
    "olmoe": ({}, 1.0),
    "mixtral": ({}, 1.0),
    # softmax or sigmoid with a bias
    "ernie4_5_moe": ({}, 1.0),
    "minimax_m2": ({}, 1.0),
    # a scaling factor
    "glm4_moe": ({"routed_scaling_factor": 2.5}, 2.5),
    "lfm2_moe": ({"routed_scaling_factor": 2.5}, 1.0),
    # functions of their own
    "phimoe": ({"architectures": ["PhiMoEForCausalLM"]}, 1.0),
    "gemma4_text": ({}, 1.0),
    "llama4_text": ({}, 1.0),
    # layers of smaller top-k
    "hunyuan_v1_moe": ({}, 1.0),
}


@functools.lru_cache(maxsize=4)
def _hook(checkpoint: Path | str) -> dict[int, npt.NDArray[np.float32]]:
    """What the last pass of the oracle's model multiplied experts with: (tokens, experts), by
    layer."""
    model, family = oracle.load(checkpoint)._model, family_of(checkpoint)
    num_experts = oracle.load(checkpoint).num_experts
    seen: dict[int, npt.NDArray[np.float32]] = {}

    def note(layer: int, ids: Any, weights: Any) -> None:
        seen[layer] = np.zeros((len(ids), num_experts), np.float32)
        np.put_along_axis(seen[layer], ids.numpy(), weights.float().numpy(), axis=1)

    def before_experts(_: Any, inputs: tuple[Any, ...], *, layer: int) -> None:
        _, ids, weights = inputs
        note(layer, ids, weights)

    def after_router(_: Any, inputs: Any, output: tuple[Any, ...], *, layer: int) -> None:
        # The experts of Llama 4 get the scores as factors of their input.
        scores = output[0].reshape(-1, num_experts)
        weights, ids = scores.topk(1)
        note(layer, ids, weights)

    for index, layer in enumerate(model.get_submodule(family.layers)):
        router = find(layer, family.router)
        if router is None:
            continue
        if family.name == "Llama4":
            router.register_forward_hook(functools.partial(after_router, layer=index))
            continue
        (experts,) = (
            module for name, module in layer.named_modules() if name.rpartition(".")[2] == "experts"
        )
        experts.register_forward_pre_hook(functools.partial(before_experts, layer=index))
    return seen


def weigh(checkpoint: Path | str, token_ids: Sequence[int]) -> dict[int, npt.NDArray[np.float32]]:
    """By MoE layer: (tokens, experts), what each expert is multiplied with. 0 if it is not
    chosen."""
    seen = _hook(checkpoint)
    oracle.route(checkpoint, token_ids)
    return dict(seen)


def spread(
    ids: npt.NDArray[Any], weights: npt.NDArray[Any], layer: int, top_k: int, num_experts: int
) -> npt.NDArray[np.float32]:
    """The weights of returned rows in the form of `weigh`."""
    spread = np.zeros((len(ids), num_experts), np.float32)
    chosen = ids[:, layer, :top_k].astype(np.int64)
    np.put_along_axis(spread, chosen, weights[:, layer, :top_k].astype(np.float32), axis=1)
    return spread


def differences(
    checkpoint: Path | str,
    token_ids: Sequence[int],
    rows: npt.NDArray[Any],
    weights: npt.NDArray[Any],
    factor: float = 1.0,
    start: int = 0,
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.bool_]]:
    """For each row from position `start` on and each MoE layer: by how much the weights differ from
    `transformers`, and whether the ids are the same. The weights of `transformers` are divided by
    `factor`. The difference from such a weight w is divided by 1 + w. Raises ValueError if a place
    without an expert has a weight."""
    routers = oracle.load(checkpoint)
    expected = weigh(checkpoint, token_ids)
    found, same = [], []
    for layer in range(routers.num_layers):
        top_k = routers.top_ks[layer] if layer in expected else 0
        # A repeated id has no weight, nor has a layer without experts.
        if weights[:, layer, top_k:].any():
            raise ValueError(f"layer {layer} has weights after its top-{top_k}")
        if top_k:
            got = spread(rows, weights, layer, top_k, routers.num_experts)
            wanted = expected[layer][start : start + len(rows)] / factor
            same.append(((got != 0) == (wanted != 0)).all(axis=1))
            found.append((np.abs(got - wanted) / (1 + np.abs(wanted))).max(axis=1))
    return np.stack(found, axis=1), np.stack(same, axis=1)
