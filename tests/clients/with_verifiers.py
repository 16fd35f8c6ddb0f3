# SPDX-License-Identifier: Apache-2.0
"""verifiers and renderers, as prime-rl uses them: renderers' own request and its reading of the
answer, verifiers' attribution of rows to the messages of a trace."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
from driving import Turn
from openai import AsyncOpenAI
from renderers.client import generate
from verifiers.v1.graph import MessageNode, _attribute_routed_experts
from verifiers.v1.trace import Branch
from verifiers.v1.types import AssistantMessage, UserMessage

from examples.clients import prime_rl_answers

prime_rl_answers.install()
RENDERER: Any = SimpleNamespace(
    get_stop_token_ids=lambda: [],
    parse_response=lambda *_, **__: SimpleNamespace(
        content="", reasoning_content=None, tool_calls=[], reasoning_complete=True
    ),
)


def replay(turns: list[Turn]) -> list[tuple[list[int], Any]]:
    return [asyncio.run(replay_one(turns))]


async def replay_one(turns: list[Turn]) -> tuple[list[int], Any]:
    trace = SimpleNamespace(nodes=[])
    said = 0
    for turn in turns:
        # What verifiers asks for, which is what was recorded (clients/train.py).
        start = max(said - 1, 0)
        answer = await ask(turn, {"routed_experts_prompt_start": start} if said else {})
        assert turn.start == start
        before = list(range(len(trace.nodes)))
        for message, tokens in (
            (UserMessage(content=""), turn.prompt[said:]),
            (AssistantMessage(content=""), answer["completion_ids"]),
        ):
            sampled = isinstance(message, AssistantMessage)
            node = MessageNode.model_construct(
                message=message,
                token_ids=np.asarray(tokens, np.int32),
                mask=np.full(len(tokens), sampled),
                sampled=sampled,
            )
            trace.nodes.append(node)
        new = list(range(len(before), len(trace.nodes)))
        _attribute_routed_experts(trace, before, new, said, answer["routed_experts"])
        said = len(turn.sequence)
    branch = Branch.model_construct(index=0, nodes=trace.nodes)
    rows = branch.routed_experts
    assert rows is not None, "verifiers has no rows for some message"
    return branch.token_ids.tolist(), rows


async def ask(turn: Turn, sampling: dict[str, Any]) -> dict[str, Any]:
    """Ask as renderers does, and get what was recorded."""

    def answer(request: httpx.Request) -> httpx.Response:
        sent = json.loads(request.content)
        assert request.url.path == "/inference/v1/generate"
        assert sent["token_ids"] == turn.prompt
        assert sent["sampling_params"].get("routed_experts_prompt_start", 0) == turn.start
        return httpx.Response(200, json=turn.chunks[0])

    http = httpx.AsyncClient(transport=httpx.MockTransport(answer))
    async with AsyncOpenAI(base_url="http://server/v1", api_key="none", http_client=http) as client:
        return await generate(
            client=client,
            renderer=RENDERER,
            messages=[],
            model="model",
            prompt_ids=turn.prompt,
            sampling_params=sampling,
            max_prompt_len=100_000,
        )
