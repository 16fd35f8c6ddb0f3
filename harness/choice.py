# SPDX-License-Identifier: Apache-2.0
"""How models choose experts from their router logits, as their papers say.

With `recorder.take` a second oracle, for models whose forward pass in vLLM is not that of Hugging
Face bit for bit, or has no float32 one. Neither vLLM's selection nor the capture under test takes
part.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from harness.oracle import Routes
from harness.recorder import Logits

SCORING: dict[str, Callable[[Any], Any]] = {
    "softmax": lambda x: np.exp(x - x.max(-1, keepdims=True)) / _exp_sum(x),
    "sigmoid": lambda x: 1 / (1 + np.exp(-x)),
    "sqrtsoftplus": lambda x: np.sqrt(np.logaddexp(0, x)),
}


def _exp_sum(x: Any) -> Any:
    return np.exp(x - x.max(-1, keepdims=True)).sum(-1, keepdims=True)


@dataclass(frozen=True)
class Choice:
    """How a model chooses its experts, as its paper says: only from the `top_groups` best groups,
    by the scored logits and a correction bias if it has one."""

    top_k: int
    groups: int = 1
    top_groups: int = 1
    scoring: str = "softmax"

    def routes(self, logits: Logits, num_layers: int, biases: Logits) -> Routes:
        """Choose for every layer, from logits of `recorder.take` and (E,) correction biases by
        layer."""
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
