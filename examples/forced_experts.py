# SPDX-License-Identifier: Apache-2.0
"""Compute with given experts: resume a rollout, score a text, take one expert away.

    python -m examples.forced_experts CHECKPOINT

Needs vLLM v0.33.0 with the series, and an engine with `enable_return_routed_experts` and
`enable_forced_routed_experts`. The functions take such a `vllm.LLM`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Rows = npt.NDArray[Any]


def resume(llm: Any, token_ids: Sequence[int], rows: Rows, params: Any) -> Any:
    """Go on with a rollout, for example after the engine got new weights.

    Args:
        llm: the engine.
        token_ids: the prompt, and the tokens sampled so far.
        rows: their rows, as they were returned. The last token has none: the engine routes it.
        params: `SamplingParams` of the tokens to come.

    Returns:
        The `RequestOutput`.
    """
    prompt = {"prompt_token_ids": list(token_ids), "forced_routed_experts": rows}
    return llm.generate([prompt], params, use_tqdm=False)[0]


def score(llm: Any, token_ids: Sequence[int], rows: Rows | None = None) -> npt.NDArray[Any]:
    """Log-probabilities of all tokens but the first, with the given experts or the model's own."""
    from vllm import SamplingParams

    prompt: dict[str, Any] = {"prompt_token_ids": list(token_ids)}
    if rows is not None:
        prompt["forced_routed_experts"] = rows
    params = SamplingParams(max_tokens=1, prompt_logprobs=0)
    (output,) = llm.generate([prompt], params, use_tqdm=False)
    found = zip(output.prompt_logprobs[1:], token_ids[1:], strict=True)
    return np.array([of_token[token].logprob for of_token, token in found])


def without_expert(rows: Rows, layer: int, expert: int, instead: int) -> Rows:
    """Rows in which a layer takes another expert in place of one. Tokens that did not choose it,
    or that have the other one already, and all other layers, are left to the router."""
    forced = np.full(rows.shape, -1, "int32")
    chosen = rows[:, layer] == expert
    changes = chosen.any(1) & ~(rows[:, layer] == instead).any(1)
    forced[changes, layer] = np.where(chosen, instead, rows[:, layer])[changes]
    return forced


def main(checkpoint: str) -> None:
    """Print what it costs a text that the first MoE layer loses its most chosen expert."""
    from vllm import LLM, SamplingParams

    llm = LLM(
        checkpoint,
        max_model_len=512,
        enable_return_routed_experts=True,
        enable_forced_routed_experts=True,
    )
    tokens = list(range(4, 104))
    (output,) = llm.generate([{"prompt_token_ids": tokens}], SamplingParams(max_tokens=1))
    completion = output.outputs[0]
    rows, layer = completion.routed_experts[: len(tokens)], completion.moe_layers[0]
    counts = np.bincount(rows[:, layer].ravel())
    forced = without_expert(rows, layer, int(counts.argmax()), int(counts.argmin()))
    cost = score(llm, tokens).mean() - score(llm, tokens, forced).mean()
    print(f"layer {layer} without expert {counts.argmax()}: {cost:+.4f} nats a token")


# vLLM imports this module again in its workers: the guard is needed.
if __name__ == "__main__":
    main(*sys.argv[1:])
