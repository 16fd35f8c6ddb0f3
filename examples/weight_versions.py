# SPDX-License-Identifier: Apache-2.0
"""A rollout over several versions of the weights: what belongs to which version.

Needs vLLM v0.33.0 with the series, and an `AsyncLLM` with `enable_return_routed_experts`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class Span:
    """Tokens that one version of the weights sampled.

    Attributes:
        version: the version's name.
        token_ids: n ids.
        logprobs: (n,) natural logarithms of their probabilities.
        rows: (n, layers, top-k): of the passes in which the tokens were sampled. Each is the row of
            the token before.
    """

    version: str
    token_ids: list[int]
    logprobs: npt.NDArray[Any]
    rows: npt.NDArray[Any]


def spans(output: Any) -> Iterator[Span]:
    """The spans of a finished `RequestOutput` with rows and log-probs."""
    completion = output.outputs[0]
    sampled = zip(completion.logprobs, completion.token_ids, strict=True)
    logprobs = [of_token[token].logprob for of_token, token in sampled]
    # The first returned token was sampled in the pass of the prompt's last token.
    first = len(output.prompt_token_ids) - 1 - completion.routed_experts_start
    for span in completion.weight_versions:
        place = slice(span.start, span.end)
        yield Span(
            span.version,
            list(completion.token_ids[place]),
            np.array(logprobs[place]),
            completion.routed_experts[first + span.start : first + span.end],
        )


async def update_weights(engine: Any, version: str, checkpoint: str) -> None:
    """Replace the weights under running requests. Their KV is computed again."""
    await engine.pause_generation(mode="keep", clear_cache=True)
    await engine.collective_rpc("reload_weights", kwargs={"weights_path": checkpoint})
    await engine.update_weight_version(version)
    await engine.resume_generation()


async def roll_out(
    engine: Any, prompt: Sequence[int], params: Any, versions: Sequence[tuple[str, str]], every: int
) -> Any:
    """Sample, and take the next version each time that `every` more tokens are there.

    Args:
        engine: the `AsyncLLM`.
        prompt: token ids.
        params: `SamplingParams` with `logprobs=0`.
        versions: name and checkpoint of each next version.
        every: tokens between two versions, at least.

    Returns:
        The finished `RequestOutput`.
    """
    waiting = list(versions)
    next_at = every
    output = None
    async for output in engine.generate({"prompt_token_ids": list(prompt)}, params, "rollout"):
        count = len(output.outputs[0].token_ids)
        if waiting and count >= next_at and not output.finished:
            await update_weights(engine, *waiting.pop(0))
            next_at = count + every
    return output
