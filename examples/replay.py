# SPDX-License-Identifier: Apache-2.0
"""Route replay: a Hugging Face MoE model takes the experts that the server took.

    with replay(model, routes, moe_layers):
        logits = model(token_ids).logits

Only the selection is replayed. The model computes the weights of the selected experts itself, as
usual, and gradients reach its routers. No model code is copied or changed: inside the context,
`torch.topk` over the experts' scores returns the given experts. Nearly every family of
`transformers` selects experts with it. A layer that selects them in another way is an error.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from examples.client import Completion

# Configuration fields that count the routed experts.
EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts")

# Stands for an expert: the model selects the experts of this token itself.
OWN = -1


class ReplayError(ValueError):
    """The routes cannot be replayed; the text says why, in one sentence."""


@contextmanager
def replay(
    model: Any, routes: torch.Tensor, moe_layers: Collection[int]
) -> Iterator[dict[int, torch.Tensor]]:
    """Make the forward passes inside the context take given experts.

    Layers that are computed again in a backward pass (gradient checkpointing) take them too, if the
    backward pass runs inside the context. A forward pass must have all tokens of its sequences:
    this is for training, not for generation with a KV cache.

    Args:
        model: a causal-LM model of `transformers`.
        routes: (B, T, L, K) integer: the experts of each token of B sequences of T tokens,
            padding included, in each of L decoder layers. A token that is `OWN` throughout
            is routed by the model itself. A layer that takes fewer than K experts takes
            the first ones.
        moe_layers: the decoder layers that route.

    Yields:
        By MoE layer: (B * T, k) int64, the experts that the model itself would have taken
        in its latest pass.

    Raises:
        ReplayError: routes that do not fit the model; from a forward pass also a number of tokens
            that does not fit the routes, or layers that route although `moe_layers` does not name
            them, or the reverse.
    """
    layers = model.get_decoder().layers
    num_experts = _count_experts(model.config.get_text_config())
    _check(routes, moe_layers, len(layers), num_experts)
    own: dict[int, torch.Tensor] = {}
    # Other wrappers, for example accelerate's, are on the instance too.
    before = [vars(layer).get("forward") for layer in layers]
    for index, layer in enumerate(layers):
        given = routes[:, :, index].flatten(0, 1) if index in moe_layers else None
        choice = functools.partial(_Choice, index, num_experts, given, own)
        layer.forward = functools.partial(_forward, choice, layer.forward)
    try:
        yield own
    finally:
        for layer, forward in zip(layers, before, strict=True):
            del layer.forward
            if forward is not None:
                layer.forward = forward


def pad_routes(completions: Sequence[Completion], length: int) -> torch.Tensor:
    """Routes of a batch for `replay`, (B, T, L, K) int64, for B completions that are padded on the
    right to T tokens. Tokens without a row are `OWN`: padding, the last token of each completion,
    and tokens before its `start`."""
    shape = (len(completions), length, *completions[0].rows.shape[1:])
    routes = torch.full(shape, OWN)
    for route, completion in zip(routes, completions, strict=True):
        rows = torch.from_numpy(completion.rows.astype("int64"))
        route[completion.start : completion.start + len(rows)] = rows
    return routes


def place_routes(
    completions: Sequence[Completion], token_ids: torch.Tensor, attention_mask: torch.Tensor
) -> torch.Tensor:
    """Routes of a batch that a trainer padded, on the left, on the right or on both sides.

    Tokens without a row are `OWN`: padding and the last token of each completion. A trainer may
    mask the end of a sequence, for example a completion that was cut off.

    Args:
        completions: B completions, with the rows of all their tokens but the last one.
        token_ids: (B, T) integer.
        attention_mask: (B, T), 0 for padding.

    Returns:
        (B, T, L, K) int32, on the device of `token_ids`.

    Raises:
        ReplayError: rows are missing, or they are of other tokens.
    """
    shape = completions[0].rows.shape[1:]
    routes = torch.full((*token_ids.shape, *shape), OWN, dtype=torch.int32)
    if len(completions) != len(token_ids):
        raise ReplayError(
            f"there are {len(completions)} completions for {len(token_ids)} sequences"
        )
    for i, (completion, route) in enumerate(zip(completions, routes, strict=True)):
        tokens, rows = [*completion.prompt, *completion.token_ids], completion.rows
        if completion.start != 0 or len(rows) != len(tokens) - 1 or rows.shape[1:] != shape:
            raise ReplayError(
                f"sequence {i} of {len(tokens)} tokens has rows of shape {rows.shape} from "
                f"position {completion.start}; wanted {(len(tokens) - 1, *shape)} from position 0"
            )
        seen = attention_mask[i].nonzero().squeeze(1)
        if token_ids[i, seen].tolist() != tokens[: len(seen)]:
            raise ReplayError(f"the tokens of sequence {i} are not those that its rows are of")
        known = seen[: len(rows)].cpu()
        route[known] = torch.from_numpy(rows[: len(known)].astype("int32"))
    return routes.to(token_ids.device)


class _Choice(TorchFunctionMode):
    """Replaces the router's top-k by the given experts, in one pass of one layer."""

    def __init__(
        self,
        layer: int,
        num_experts: int,
        given: torch.Tensor | None,
        own: dict[int, torch.Tensor],
    ) -> None:
        super().__init__()
        self.layer = layer
        self.num_experts = num_experts
        self.given = given
        self.own = own
        self.choices = 0

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is not torch.topk and func is not torch.Tensor.topk:
            return result
        scores = args[0]
        # Some routers select groups of experts first.
        if scores.ndim != 2 or scores.shape[-1] != self.num_experts:
            return result
        self.choices += 1
        if self.given is None:
            return result
        self.own[self.layer] = result.indices
        return torch.return_types.topk(self._take(self.given, scores, result.indices))

    def _take(
        self, given: torch.Tensor, scores: torch.Tensor, own: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Scores and ids of the given experts. Where they equal the model's own set, they keep its
        order, so that results are bitwise equal."""
        tokens, k = own.shape
        if len(given) != tokens or given.shape[1] < k:
            raise ReplayError(
                f"layer {self.layer} takes {k} experts for each of {tokens} tokens; the routes "
                f"have {given.shape[1]} for each of {len(given)}"
            )
        given = given[:, :k].to(own)
        given = torch.where(given == OWN, own, given)
        in_order = given.sort().values
        if (in_order.diff() == 0).any():
            raise ReplayError(f"the routes name an expert of layer {self.layer} twice for a token")
        same = (in_order == own.sort().values).all(dim=-1, keepdim=True)
        ids = torch.where(same, own, given)
        return scores.gather(-1, ids), ids


def _forward(
    choice: Callable[[], _Choice], forward: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """A layer's forward pass with its choice replaced."""
    with choice() as made:
        result = forward(*args, **kwargs)
    wanted = int(made.given is not None)
    if made.choices != wanted:
        raise ReplayError(
            f"decoder layer {made.layer} chose experts by torch.topk {made.choices} times in a "
            f"pass; by moe_layers it should {wanted} times"
        )
    return result


def _count_experts(config: Any) -> int:
    if getattr(config, "topk_method", None) == "group_limited_greedy":
        # It gives experts of other groups no weight.
        raise ReplayError("a router of topk_method 'group_limited_greedy' cannot be replayed")
    for field in EXPERTS:
        if isinstance(count := getattr(config, field, None), int):
            return count
    raise ReplayError(f"{type(config).__name__} has none of the fields {', '.join(EXPERTS)}")


def _check(
    routes: torch.Tensor, moe_layers: Collection[int], num_layers: int, num_experts: int
) -> None:
    if routes.ndim != 4 or routes.shape[2] != num_layers or routes.is_floating_point():
        raise ReplayError(
            f"the routes are {routes.dtype} of shape {tuple(routes.shape)}; "
            f"wanted integers of shape (sequences, tokens, {num_layers} layers, top-k)"
        )
    if not {*moe_layers} <= {*range(num_layers)}:
        raise ReplayError(f"moe_layers is {list(moe_layers)}; there are {num_layers} layers")
    if ((routes < OWN) | (routes >= num_experts)).any():
        raise ReplayError(f"the routes name an expert that is none of {num_experts}")
    own = routes == OWN
    if (own.any(dim=-1) != own.all(dim=-1)).any():
        raise ReplayError("the routes have a token with some experts given and some not")
