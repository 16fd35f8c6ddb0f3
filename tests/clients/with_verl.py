# SPDX-License-Identifier: Apache-2.0
"""verl: its rollout client, which resumes what was aborted; its agent loop's output; what its
Megatron engine hands to the routers. A stand-in replaces the Ray actor that holds the engine."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import torch
from driving import OWN, Turn
from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics, AgentLoopOutput
from verl.utils.megatron.router_replay_utils import (
    align_r3_router_replay_data,
    build_r3_replay_mask,
)
from verl.workers.rollout.llm_server import FullyAsyncLLMServerClient
from verl.workers.rollout.replica import TokenOutput

ROLLOUT = SimpleNamespace(name="vllm", full_determinism=False, response_length=1024)
CONFIG = SimpleNamespace(actor_rollout_ref=SimpleNamespace(rollout=ROLLOUT))


def remote(result: Any) -> Any:
    """A method of a Ray actor that returns `result(...)`."""

    async def call(**arguments: Any) -> Any:
        return result(**arguments)

    return SimpleNamespace(remote=call)


def replay(turns: list[Turn]) -> list[tuple[list[int], Any]]:
    choices = len(turns[-1].completions())
    return [asyncio.run(replay_one(turns, choice)) for choice in range(choices)]


async def replay_one(turns: list[Turn], choice: int) -> tuple[list[int], Any]:
    recorded = iter(turns)

    def answer(prompt_ids: list[int], **_: Any) -> TokenOutput:
        """What `vLLMHttpServer` returns."""
        turn = next(recorded)
        assert prompt_ids == turn.prompt
        if turn.aborted_at_once:
            return TokenOutput(token_ids=[], stop_reason="aborted")
        completion = turn.completions()[choice]
        return TokenOutput(
            token_ids=list(completion.token_ids),
            routed_experts=completion.rows,
            stop_reason="aborted" if completion.finish_reason == "abort" else "completed",
            num_preempted=0,
        )

    replica = SimpleNamespace(generate=remote(answer))
    balancer = SimpleNamespace(
        require_acquire_fields=remote(list),
        require_release_fields=remote(list),
        acquire_server=remote(lambda request_id: ("server", replica)),
        release_server=SimpleNamespace(remote=lambda server_id: None),
    )
    client = FullyAsyncLLMServerClient(CONFIG, balancer)
    first = turns[0].prompt
    # The agent loop: the rows of the last turn are those of all turns (tool_agent_loop.py). The
    # client itself sends what resumes an aborted turn.
    reasons = [None, *(turn.finish_reason for turn in turns)]
    prompts = [
        turn.prompt for turn, before in zip(turns, reasons, strict=False) if before != "abort"
    ]
    for prompt in prompts:
        output = await client.generate("request", prompt_ids=prompt, sampling_params={})
    response = [*prompt[len(first) :], *output.token_ids]
    loop = AgentLoopOutput(
        prompt_ids=first,
        response_ids=response,
        response_mask=[1] * len(response),
        routed_experts=output.routed_experts,
        metrics=AgentLoopMetrics(),
    ).as_dict()
    tokens = torch.cat([loop["prompts"], loop["responses"]])
    input_ids = torch.nested.nested_tensor([tokens], layout=torch.jagged)
    routes = torch.nested.nested_tensor([loop["routed_experts"]], layout=torch.jagged)
    (aligned,) = align_r3_router_replay_data(routes, input_ids).unbind()
    (given,) = build_r3_replay_mask(input_ids, loop["response_mask"][None]).unbind()
    return tokens.tolist(), torch.where(given[:, None, None], aligned, OWN).numpy()
