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
