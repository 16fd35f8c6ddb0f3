# SPDX-License-Identifier: Apache-2.0
"""The independent oracle: which experts Hugging Face `transformers` chooses.

It runs the same checkpoint in float32 in one pass over the whole sequence, without chunks,
batches or caches, and reads the routers by forward hooks. Nothing of vLLM takes part.

A *row* is one token's experts at all MoE layers; a *decision* is one token at one layer.
Rows are compared as sets per decision, because the order within a top-k means nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from harness.checkpoint import family_of
from harness.families import EXPERTS, find

# Two float32 implementations add in different orders: closer than this at the k-th place,
# either choice is right.
TIE = 1e-5


@dataclass(frozen=True)
class Routes:
    """The oracle's choice for one sequence: T tokens, M MoE layers, E experts, top-k of K. A layer
    that chooses fewer than K repeats its last id. Scores are what the experts are chosen by:
    logits, unless the family says otherwise, and -inf outside the chosen groups."""

    layers: tuple[int, ...]  # (M,) that route, ascending
    num_layers: int  # dense ones included
    ids: npt.NDArray[np.int64]  # (M, T, K), sorted by id
    scores: npt.NDArray[np.float32]  # (M, T, E)

    @property
    def chosen(self) -> npt.NDArray[np.bool_]:
        """(M, T, E) bool, True where the expert is one of the K."""
        mask = np.zeros(self.scores.shape, dtype=bool)
        np.put_along_axis(mask, self.ids, True, axis=-1)
        return mask

    @property
    def margin(self) -> npt.NDArray[np.float32]:
        """(M, T) float32: the least score chosen less the greatest not chosen."""
        chosen = self.chosen
        least = np.where(chosen, self.scores, np.inf).min(axis=-1)
        greatest = np.where(chosen, -np.inf, self.scores).max(axis=-1)
        return least - greatest


@dataclass(frozen=True)
class Disagreement:
    """One decision where captured experts and oracle differ, and no tie explains it."""

    position: int
    layer: int
    got: tuple[int, ...]  # sorted
    want: tuple[int, ...]  # sorted; empty for a layer that does not route
    margin: float  # the oracle's, at the k-th place

    def __str__(self) -> str:
        got, want = (" ".join(map(str, ids)) or "none" for ids in (self.got, self.want))
        return (
            f"the row at position {self.position} disagrees in layer {self.layer}: "
            f"captured experts {got}, oracle {want} (margin {self.margin:.2g})"
        )


@dataclass
class Comparison:
    """Counts over one or more sequences; add two with `+`."""

    rows: int = 0
    agree: int = 0  # every decision agrees, or differs only among tied experts
    decisions: int = 0  # rows times MoE layers
    ties: int = 0  # decisions whose margin is below `TIE`, agreeing or not
    disagreements: list[Disagreement] = field(default_factory=list)

    def __add__(self, other: Comparison) -> Comparison:
        return Comparison(
            self.rows + other.rows,
            self.agree + other.agree,
            self.decisions + other.decisions,
            self.ties + other.ties,
            self.disagreements + other.disagreements,
        )

    @property
    def tie_share(self) -> float:
        """Ties among decisions, 0 to 1."""
        return self.ties / self.decisions if self.decisions else 0.0


class Oracle:
    """A checkpoint loaded in `transformers`, with hooks on its routers."""

    def __init__(self, checkpoint: Path | str) -> None:
        """Load a checkpoint of `checkpoint.FAMILIES` in float32 on the CPU. Raises ValueError if
        there is none, or no router in it."""
        import torch
        import transformers

        self._family = family_of(checkpoint)
        transformers.utils.logging.disable_progress_bar()
        model_class = getattr(transformers, self._family.model)
        self._model = model_class.from_pretrained(
            checkpoint, dtype=torch.float32, attn_implementation="eager", local_files_only=True
        ).eval()
        self._seen: dict[int, tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]] = {}
        layers = self._model.get_submodule(self._family.layers)
        self.num_layers = len(layers)
        config = self._model.config.get_text_config()
        self.num_experts = int(find(config, EXPERTS))
        top_k = attrgetter(self._family.top_k)(config)
        self.top_ks = top_k if isinstance(top_k, list) else [top_k] * self.num_layers
        self.top_k = max(self.top_ks)
        routing = []
        for index, layer in enumerate(layers):
            router = find(layer, self._family.router)
            if router is None:
                continue  # a dense layer
            bias = find(layer, self._family.bias)
            router.register_forward_hook(functools.partial(self._hook, index, bias))
            routing.append(index)
        if not routing:
            raise ValueError(f"{checkpoint} has no layer with a router")
        self.layers = tuple(routing)

    def route(self, token_ids: Sequence[int], past: Any = None) -> Routes:
        """Route a whole sequence. `past` is a cache of `transformers` with the KV of the tokens
        before these; it gets the KV of these too."""
        import torch

        if not len(token_ids):
            raise ValueError("there are no tokens to route")
        self._seen.clear()
        with torch.inference_mode():
            self._model(
                torch.tensor([list(token_ids)]), past_key_values=past, use_cache=past is not None
            )
        ids = np.stack([self._seen[layer][0] for layer in self.layers])
        scores = np.stack([self._seen[layer][1] for layer in self.layers])
        return Routes(self.layers, self.num_layers, ids, scores)

    def _hook(
        self, layer: int, bias: Any, router: Any, inputs: tuple[Any, ...], output: Any
    ) -> None:
        import torch.nn.functional as F

        ids = None
        if isinstance(output, tuple):  # a router that chooses itself: take its choice
            ids = next((o for o in output if not o.is_floating_point()), None)
            hidden = inputs[0].reshape(-1, inputs[0].shape[-1]).float()
            output = F.linear(hidden, router.weight.float(), getattr(router, "bias", None))
        scores = output.reshape(-1, output.shape[-1]).float()
        if self._family.scores == "sigmoid":
            scores = scores.sigmoid()
        elif self._family.scores == "softmax":
            scores = scores.softmax(dim=-1)
        if bias is not None:
            scores = scores + bias.flatten()
        if ids is None:
            ids = scores.topk(self.top_ks[layer], dim=-1).indices
        ids = F.pad(ids.sort(dim=-1).values, (0, self.top_k - ids.shape[-1]), mode="replicate")
        self._seen[layer] = (ids.numpy(), scores.numpy())


@functools.lru_cache(maxsize=4)
def load(checkpoint: Path | str) -> Oracle:
    """The oracle of a checkpoint. The last few ones stay loaded."""
    return Oracle(checkpoint)


def route(checkpoint: Path | str, token_ids: Sequence[int]) -> Routes:
    """`Oracle.route` of a checkpoint that stays loaded between calls."""
    return load(checkpoint).route(token_ids)


def route_in_turns(*turns: tuple[Path | str, Sequence[int]]) -> Routes:
    """Route a sequence whose weights change: each checkpoint computes its tokens over the KV that
    the ones before it computed."""
    from transformers import DynamicCache

    past = DynamicCache()
    parts = [load(checkpoint).route(token_ids, past) for checkpoint, token_ids in turns]
    ids = np.concatenate([part.ids for part in parts], axis=1)
    scores = np.concatenate([part.scores for part in parts], axis=1)
    return Routes(parts[0].layers, parts[0].num_layers, ids, scores)


def compare(
    rows: npt.NDArray[np.integer[Any]], routes: Routes, start: int = 0, tie: float = TIE
) -> Comparison:
    """Compare captured rows, of positions from `start` on, with the oracle's. A decision that
    differs is excused only if every expert in one set but not in the other is tied with the k-th
    place. Layers without routing must be zero; a layer of smaller top-k may repeat ids. Raises
    ValueError for a shape that cannot be compared, or an id that is no expert."""
    if rows.ndim != 3 or rows.shape[1] != routes.num_layers:
        raise ValueError(
            f"the rows have shape {rows.shape}; wanted (rows, {routes.num_layers} layers, top-k)"
        )
    known = routes.ids.shape[1]
    count, experts = len(rows), routes.scores.shape[-1]
    if not 0 <= start <= start + count <= known:
        raise ValueError(f"rows {start} to {start + count - 1} of {known} tokens do not exist")
    if count and not 0 <= int(rows.min()) <= int(rows.max()) < experts:
        raise ValueError(f"the rows name expert {rows.max()}; there are {experts}")

    span = slice(start, start + count)
    scores, want = routes.scores[:, span], routes.chosen[:, span]
    got = np.zeros_like(want)
    np.put_along_axis(
        got, rows[:, list(routes.layers)].transpose(1, 0, 2).astype(np.int64), True, axis=-1
    )
    differ = got != want  # (M, R, E)
    margin = routes.margin[:, span]
    kth = np.where(want, scores, np.inf).min(axis=-1, keepdims=True)
    tied = np.abs(scores - kth) < tie
    # A set of another size is always wrong.
    same_size = got.sum(axis=-1) == want.sum(axis=-1)
    wrong = (differ & ~tied).any(axis=-1) | ~same_size  # (M, R)

    bad_rows = wrong.any(axis=0)
    disagreements = [
        Disagreement(
            position=start + int(r),
            layer=routes.layers[m],
            got=_sorted_ids(got[m, r].nonzero()[0]),
            want=_sorted_ids(want[m, r].nonzero()[0]),
            margin=float(margin[m, r]),
        )
        for r, m in np.argwhere(wrong.T)
    ]
    for layer in sorted(set(range(routes.num_layers)) - set(routes.layers)):
        for r in np.flatnonzero((rows[:, layer] != 0).any(axis=-1)):
            bad_rows[r] = True
            disagreements.append(
                Disagreement(start + int(r), layer, _sorted_ids(set(rows[r, layer])), (), 0.0)
            )
    disagreements.sort(key=lambda d: (d.position, d.layer))
    return Comparison(
        rows=count,
        agree=count - int(bad_rows.sum()),
        decisions=margin.size,
        ties=int((margin < tie).sum()),
        disagreements=disagreements,
    )


def _sorted_ids(ids: Iterable[int]) -> tuple[int, ...]:
    return tuple(sorted(int(i) for i in ids))
