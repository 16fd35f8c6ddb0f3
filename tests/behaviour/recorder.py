# SPDX-License-Identifier: Apache-2.0
"""A second oracle: the router logits that vLLM's own forward pass computed.

For models whose forward pass in vLLM is not that of Hugging Face bit for bit, or has no float32
one. Hooks in the worker read what each layer's gate returned and at which positions; the
experts are chosen here, from the published formula. Neither the selection nor the capture
under test takes part. One request at a time: a position has one token then.
"""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import cloudpickle
import numpy as np
import numpy.typing as npt

from examples.demo.oracle import Routes

if TYPE_CHECKING:
    from vllm import LLM

# Of a decoder layer's gate in vLLM's modules.
GATE = re.compile(r"(?:^|\.)layers\.(\d+)\.mlp\.(?:gate|router)$")

# A worker process need not find this module.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

Logits = dict[int, npt.NDArray[np.float32]]

SCORING: dict[str, Callable[[Any], Any]] = {
    "softmax": lambda x: np.exp(x - x.max(-1, keepdims=True)) / _exp_sum(x),
    "sigmoid": lambda x: 1 / (1 + np.exp(-x)),
    "sqrtsoftplus": lambda x: np.sqrt(np.logaddexp(0, x)),
}


def _exp_sum(x: Any) -> Any:
    return np.exp(x - x.max(-1, keepdims=True)).sum(-1, keepdims=True)


def start(llm: LLM) -> None:
    """Record from now on."""
    llm.collective_rpc(_attach)


def take(llm: LLM) -> Logits:
    """(T, E) logits by decoder layer, of positions 0 to T - 1; then begin anew."""
    (steps,) = llm.collective_rpc(_take)
    by_layer: dict[int, dict[int, npt.NDArray[np.float32]]] = {}
    for layer, positions, logits in steps:
        assert len(positions) == len(logits)
        by_layer.setdefault(layer, {}).update(zip(positions.tolist(), logits, strict=True))
    for seen in by_layer.values():
        assert sorted(seen) == list(range(len(seen)))
    return {
        layer: np.stack([seen[p] for p in range(len(seen))])
        for layer, seen in sorted(by_layer.items())
    }


def _attach(worker: Any) -> None:
    model = worker.model_runner.get_model()
    steps = model.recorded_steps = []
    positions: list[Any] = []

    def see_batch(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        positions[:] = [kwargs["positions"].numpy().copy()]

    def see_logits(layer: int, module: Any, args: Any, output: Any) -> None:
        logits = output[0] if isinstance(output, tuple) else output
        steps.append((layer, positions[0], logits.float().numpy().copy()))

    model.register_forward_pre_hook(see_batch, with_kwargs=True)
    for name, module in model.named_modules():
        if match := GATE.search(name):
            module.register_forward_hook(functools.partial(see_logits, int(match[1])))


def _take(worker: Any) -> list[Any]:
    steps = worker.model_runner.get_model().recorded_steps
    taken = list(steps)
    steps.clear()
    return taken


@dataclass(frozen=True)
class Choice:
    """How a model chooses its experts, as its paper says.

    Attributes:
        top_k: experts a token.
        groups, top_groups: only the experts of the `top_groups` best of `groups` groups.
        scoring: what of the logits, to which a correction bias is added.
    """

    top_k: int
    groups: int = 1
    top_groups: int = 1
    scoring: str = "softmax"

    def routes(self, logits: Logits, num_layers: int, biases: Logits) -> Routes:
        """Choose for every layer.

        Args:
            logits: of `take`.
            num_layers: number of all decoder layers.
            biases: (E,) correction bias by decoder layer, of those that have one.
        """
        scores = np.stack([self._choose(seen, biases.get(i))[0] for i, seen in logits.items()])
        ids = np.sort(np.argsort(-scores, axis=-1, kind="stable")[..., : self.top_k], axis=-1)
        return Routes(tuple(logits), num_layers, ids, scores)

    def undecided(self, logits: Logits, biases: Logits) -> set[tuple[int, int]]:
        """(position, layer) where the best group left out is as good as the worst chosen:
        bfloat16 logits, which vLLM's DeepSeek gates return, are often equal."""
        return {
            (int(position), layer)
            for layer, seen in logits.items()
            for position in self._choose(seen, biases.get(layer))[1].nonzero()[0]
        }

    def _choose(
        self, logits: npt.NDArray[np.float32], bias: npt.NDArray[np.float32] | None
    ) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.bool_]]:
        """Scores, -inf outside the chosen groups, and which tokens' groups are tied."""
        scores = SCORING[self.scoring](logits.astype(np.float64))
        if bias is not None:
            scores = scores + bias
        by_group = scores.reshape(len(scores), self.groups, -1)
        # DeepSeek-V3 rates a group by its two best experts, DeepSeek-V2 by its best.
        rated = np.sort(by_group, axis=-1)[..., -2 if bias is not None else -1 :].sum(axis=-1)
        ranking = np.argsort(-rated, axis=-1, kind="stable")
        np.put_along_axis(by_group, ranking[:, self.top_groups :, None], -np.inf, axis=1)
        ratings = np.take_along_axis(rated, ranking, axis=-1)
        tied = np.zeros(len(scores), dtype=bool)
        if self.top_groups < self.groups:
            tied = ratings[:, self.top_groups - 1] - ratings[:, self.top_groups] < 1e-7
        return by_group.reshape(scores.shape).astype(np.float32), tied
