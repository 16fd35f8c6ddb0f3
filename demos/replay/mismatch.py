# SPDX-License-Identifier: Apache-2.0
"""How far a trainer's log-probs are from the server's, for the same sampled tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from examples.client import Completion
from examples.replay import OWN, pad_routes, replay

BATCH = 16  # sequences of one forward pass
RESAMPLES = 10_000


@dataclass(frozen=True)
class Mismatch:
    """A trainer against a server, over completions of O sampled tokens and R rows each."""

    delta: list[npt.NDArray[np.float64]]  # (O,): the trainer's log-prob less the server's
    differs: list[npt.NDArray[np.bool_]]  # (R, M): the trainer would take others

    @cached_property
    def deltas(self) -> npt.NDArray[np.float64]:
        """`delta` of all tokens, joined."""
        return np.concatenate(self.delta)

    @property
    def mean(self) -> float:
        """Mean of |delta|."""
        return float(np.abs(self.deltas).mean())

    @property
    def k3(self) -> float:
        """Estimate of the KL divergence of the trainer's distribution from the server's,
        which sampled, in nats: the mean of r - 1 - log r, where r is the importance
        ratio, the trainer's probability over the server's."""
        return float((np.expm1(self.deltas) - self.deltas).mean())

    @property
    def ratios(self) -> tuple[float, float]:
        """The least and the greatest importance ratio."""
        least, greatest = np.exp(self.deltas[[self.deltas.argmin(), self.deltas.argmax()]])
        return float(least), float(greatest)

    @property
    def decisions(self) -> float:
        """Share of decisions, a token in a layer, in which the own choice differs."""
        return float(np.concatenate(self.differs).mean())

    @property
    def tokens(self) -> float:
        """Share of tokens whose own choice differs in at least one layer."""
        return float(np.concatenate(self.differs).any(axis=1).mean())


@dataclass(frozen=True)
class Gain:
    """How many times nearer replay is, with its 95 % confidence interval."""

    times: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.times:.2f} ({self.low:.2f} to {self.high:.2f})"


def load(checkpoint: Path, dtype: torch.dtype) -> Any:
    """The Hugging Face model."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    return transformers.AutoModelForCausalLM.from_pretrained(
        checkpoint, dtype=dtype, local_files_only=True
    ).eval()


def measure(model: Any, completions: Sequence[Completion], *, replayed: bool) -> Mismatch:
    """Compute log-probs of the sampled tokens as a trainer does, from whole sequences. With
    `replayed`, it takes the server's experts; else it chooses itself."""
    found = Mismatch([], [])
    for begin in range(0, len(completions), BATCH):
        batch = completions[begin : begin + BATCH]
        sequences = [torch.tensor(c.prompt + c.token_ids) for c in batch]
        tokens = torch.nn.utils.rnn.pad_sequence(sequences, batch_first=True)
        routes = pad_routes(batch, tokens.shape[1])
        if not replayed:
            routes.fill_(OWN)
        with torch.inference_mode(), replay(model, routes, batch[0].moe_layers) as own:
            # Attention is causal: padding on the right reaches no token before it.
            logprobs = model(tokens, use_cache=False).logits.float().log_softmax(dim=-1)
        for i, (completion, found_logprobs) in enumerate(
            zip(batch, sampled(logprobs, batch, tokens), strict=True)
        ):
            found.delta.append(found_logprobs.double().numpy() - np.array(completion.logprobs))
            span = slice(completion.start, completion.start + len(completion.rows))
            found.differs.append(
                _differs(
                    completion,
                    {m: ids.view(*tokens.shape, -1)[i, span].numpy() for m, ids in own.items()},
                )
            )
    return found


def nearer(plain: Mismatch, replayed: Mismatch) -> Gain:
    """The mean |delta| of one over that of the other.

    The interval is a bootstrap over whole completions, since tokens of one are not
    independent.
    """
    sums = np.array([[np.abs(d).sum() for d in m.delta] for m in (plain, replayed)])
    ratios = np.divide(*sums[:, draw(sums.shape[1])].sum(axis=-1))
    low, high = np.percentile(ratios, [2.5, 97.5])
    return Gain(float(np.divide(*sums.sum(axis=-1))), float(low), float(high))


def draw(count: int) -> npt.NDArray[np.int64]:
    """(RESAMPLES, count) indices of a bootstrap over `count` completions."""
    return np.random.default_rng(0).integers(count, size=(RESAMPLES, count))


def sampled(
    logprobs: torch.Tensor, batch: Sequence[Completion], tokens: torch.Tensor
) -> list[torch.Tensor]:
    """For each completion (O,): the log-probs of its sampled tokens, of (B, T, vocabulary)."""
    following = logprobs[:, :-1].gather(-1, tokens[:, 1:, None]).squeeze(-1)
    firsts = [len(completion.prompt) - 1 for completion in batch]
    return [
        row[first : first + len(completion.token_ids)]
        for row, first, completion in zip(following, firsts, batch, strict=True)
    ]


def _differs(
    completion: Completion, own: Mapping[int, npt.NDArray[np.int64]]
) -> npt.NDArray[np.bool_]:
    """(R, M) bool: where the sets of experts differ; `own` has (R, k) ids by MoE layer."""
    layers = [
        np.sort(own[layer]) != np.sort(rows[:, : own[layer].shape[1]])
        for layer, rows in completion.by_layer().items()
    ]
    return np.stack([layer.any(axis=1) for layer in layers], axis=1)
