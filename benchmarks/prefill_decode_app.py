# SPDX-License-Identifier: Apache-2.0
"""The server of `prefill_decode.py`: vLLM's code for the prompt's rows, without an engine."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncGenerator
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import numpy as np
from fastapi import FastAPI, Response
from vllm.entrypoints.openai.completion.protocol import (
    CompletionRequest,
    CompletionResponse,
    CompletionResponseChoice,
    UsageInfo,
)
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import SamplingParams

IS_FIRST = find_spec("vllm.entrypoints.prompt_routed_experts") is not None
if IS_FIRST:
    from vllm.entrypoints import prompt_routed_experts as prompt
    from vllm.entrypoints.routed_experts_responses import (
        take_routed_experts_fields as fields_of,
    )
    from vllm.entrypoints.routed_experts_responses import to_json_response
else:
    from vllm.entrypoints.common import prompt_routed_experts as prompt
    from vllm.entrypoints.common.routed_experts import routed_experts_fields as fields_of
    from vllm.entrypoints.common.routed_experts import to_json_response

LAYERS, TOP_K, EXPERTS = 61, 8, 256
MODEL = SimpleNamespace(
    get_total_num_hidden_layers=lambda: LAYERS,
    get_num_experts_per_tok=lambda: TOP_K,
    get_num_experts=lambda: EXPERTS,
    hf_text_config=SimpleNamespace(),
)
AUX = SimpleNamespace(enabled=True, routed_experts_opt_in=False)
CONFIG = SimpleNamespace(model_config=MODEL, aux_output_config=AUX)


@functools.cache
def make_rows(tokens: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, EXPERTS, (tokens, LAYERS, TOP_K), np.uint8)


async def make_final(start: int, tokens: int, params: dict[str, Any] | None) -> RequestOutput:
    """What the engine returns at the end: rows from `start` on, and what the connector says."""
    # Not in the event loop, where an engine would not make rows either.
    rows: Any = await asyncio.to_thread(lambda: make_rows(tokens)[start:].copy())
    completion = CompletionOutput(0, "", [1], None, None, [rows] if IS_FIRST else rows)
    completion.routed_experts_start = start
    completion.moe_layers = list(range(LAYERS))
    completion.num_prompt_tokens = tokens
    return RequestOutput(
        "id", None, [1] * tokens, None, [completion], True, kv_transfer_params=params
    )


async def read(request: CompletionRequest, tokens: int) -> Any:
    if not IS_FIRST:
        return await prompt.read_prompt_routed_experts(request, SamplingParams(), 1, tokens, CONFIG)
    return await prompt.read_prompt_routed_experts(
        request, 0, n=1, num_prompts=1, num_prompt_tokens=tokens, model_config=MODEL
    )


async def write(request: CompletionRequest, final: RequestOutput) -> Response:
    choices = [CompletionResponseChoice(index=0, text="", **fields_of(*final.outputs))]
    if IS_FIRST:
        added = prompt.add_prompt_routed_experts(request, final.kv_transfer_params, choices)
    else:
        added = prompt.add_prompt_routed_experts(request, final)
    return await to_json_response(
        CompletionResponse(model="m", choices=choices, usage=UsageInfo(), kv_transfer_params=added)
    )


def make_app() -> FastAPI:
    """`/prefill` and `/decode`. The `seed` of a request is the length of its prompt."""
    app = FastAPI()

    @app.post("/prefill", response_model=None)
    async def prefill(request: CompletionRequest) -> Response:
        final = await make_final(0, request.seed, {"remote_block_ids": [1]})
        return await write(request, final)

    @app.post("/decode", response_model=None)
    async def decode(request: CompletionRequest) -> Response:
        async def outputs() -> AsyncGenerator[RequestOutput, None]:
            yield await make_final(request.seed - 1, request.seed, None)

        rows = await read(request, request.seed)
        finals = [final async for final in (rows.join(outputs()) if rows else outputs())]
        return await write(request, finals[-1])

    return app
