# SPDX-License-Identifier: Apache-2.0
"""Resume aborted rollouts with the experts that their tokens were sampled with.

    engine = ResumingEngine(engine)  # a `vllm.AsyncLLM`

One file to copy. It needs vLLM v0.33.0 with the series, `enable_return_routed_experts` and
`enable_forced_routed_experts`. verl and others resume an aborted request as a new one. The new
prompt is the old prompt and the tokens so far. After an update of weights, routers choose other
experts for these tokens. With this engine, the tokens keep the experts that they had.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

# Aborted requests whose rows are kept. The oldest go first: nobody resumed them.
LIMIT = 1024


class ResumingEngine:
    """An `AsyncLLM` that remembers the rows of aborted requests.

    A prompt that equals the prompt and the tokens of an aborted request gets this request's rows,
    once. All else goes to the engine unchanged.
    """

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._aborted: dict[tuple[int, ...], dict[str, Any]] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def generate(
        self, prompt: dict[str, Any], *args: Any, **kwargs: Any
    ) -> AsyncGenerator[Any, None]:
        """As `AsyncLLM.generate`, for a prompt of token ids, one choice and cumulative outputs."""
        tokens = tuple(prompt["prompt_token_ids"])
        if (kept := self._aborted.pop(tokens, None)) is not None:
            prompt = {**prompt, **kept}
        completion = None
        async for output in self._engine.generate(prompt, *args, **kwargs):
            completion = output.outputs[0] if output.outputs else None
            yield output
        if completion is None or completion.finish_reason != "abort" or not completion.token_ids:
            return
        # Rows of prompts with images cannot be given back.
        if completion.routed_experts is not None and not prompt.get("multi_modal_data"):
            self._aborted[(*tokens, *completion.token_ids)] = {
                "forced_routed_experts": completion.routed_experts,
                "forced_routed_experts_start": completion.routed_experts_start or 0,
            }
            while len(self._aborted) > LIMIT:
                del self._aborted[next(iter(self._aborted))]
