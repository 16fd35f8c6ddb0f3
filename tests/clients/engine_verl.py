# SPDX-License-Identifier: Apache-2.0
"""verl's rollout server, `vLLMHttpServer`, around the vLLM of this environment. The variable RECIPE
has the command of the recipe, for its options.

The server runs in this process, not in a Ray actor, which would ask Ray for a GPU. Without Ray, the
one answer of it that the server needs, the name of the job, is made up.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from driving import ENGINE, Turn, make_turn, run_engine

OPTIONS = [
    "dtype=float32",
    "enforce_eager=True",
    "load_format=auto",
    "tensor_model_parallel_size=1",
    "max_model_len=1024",
    "max_num_seqs=8",
    "max_num_batched_tokens=64",
    "enable_sleep_mode=False",
    "free_cache_engine=False",
]


def make_server(checkpoint: str) -> Any:
    """The server with options as on verl's command line."""
    import ray
    import verl
    from omegaconf import OmegaConf
    from verl.workers.rollout.replica import RolloutMode
    from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer

    ray.get_runtime_context = lambda: SimpleNamespace(get_job_id=lambda: "job")
    own = [f"engine_kwargs.vllm.{key}={value}" for key, value in ENGINE.items()]
    options = [f"actor_rollout_ref.rollout.{option}" for option in [*OPTIONS, *own]]
    # Composed by verl: the locked hydra cannot.
    recipe = os.environ["RECIPE"]
    (name,) = re.findall(r"--config-name (\S+)", recipe)
    file = Path(verl.__file__).parent / "trainer" / "config" / f"_generated_{name}.yaml"
    whole = OmegaConf.load(file)
    OmegaConf.set_struct(whole, True)  # refuses options that verl does not have
    whole.merge_with_dotlist(re.findall(r"actor_rollout_ref\S+=\S+", recipe))
    OmegaConf.set_struct(whole, False)
    whole.merge_with_dotlist([f"actor_rollout_ref.model.path={checkpoint}", *options])
    config = whole.actor_rollout_ref
    return vLLMHttpServer(
        config=config.rollout,
        model_config=config.model,
        rollout_mode=RolloutMode.STANDALONE,
        workers=[],
        replica_rank=0,
        node_rank=0,
        gpus_per_node=0,
        nnodes=1,
        cuda_visible_devices="",
    )


def can_abort(engine: Any) -> bool:
    """Whether vLLM has the argument with which verl 0.9.1 pauses it; vLLM 0.33.0 has not."""
    return "wait_for_inflight_requests" in inspect.signature(engine.pause_generation).parameters


async def record(server: Any) -> list[tuple[str, list[Turn]]]:
    rng = np.random.default_rng(0)
    found = []

    def tokens(length: int) -> list[int]:
        return [int(t) for t in rng.integers(4, 700, length)]

    async def ask(prompt: list[int], **sampling: Any) -> tuple[list[int], Any, str]:
        sampling = {"temperature": 0.0, "ignore_eos": True, "max_tokens": 9, **sampling}
        output = await server.generate(list(prompt), sampling, f"request-{rng.random()}")
        reason = "abort" if output.stop_reason == "aborted" else "length"
        return output.token_ids, output.routed_experts, reason

    prompt = tokens(131)
    answer = await ask(prompt)
    found.append(("one turn", [make_turn(prompt, [answer])]))

    longer = [*prompt, *answer[0], *tokens(11)]
    found.append(("prefix-cache hit", [make_turn(longer, [await ask(longer)])]))

    turns, said = [], tokens(131)
    for _ in range(4):
        answer = await ask(said)
        turns.append(make_turn(said, [answer]))
        said = [*said, *answer[0], *tokens(11)]
    found.append(("several turns, resent", turns))

    prompt = tokens(131)
    samples = [await ask(prompt, temperature=1.0, seed=seed) for seed in range(4)]
    found.append(("n > 1", [make_turn(prompt, samples)]))

    if not can_abort(server.engine):
        return found
    prompt = tokens(131)
    asked = asyncio.create_task(ask(prompt, max_tokens=700))
    states = server.engine.output_processor.request_states
    while not any(state.detokenizer.num_output_tokens() > 8 for state in states.values()):
        await asyncio.sleep(0.01)
    await server.abort_all_requests()
    aborted = await asked
    assert aborted[2] == "abort", "the request ended before the abort"
    assert 8 < len(aborted[0]) < 700
    await server.resume_generation()
    said = [*prompt, *aborted[0]]
    turns = [make_turn(prompt, [aborted]), make_turn(said, [await ask(said)])]
    found.append(("abort and resume", turns))
    return found


def roll_out(checkpoint: str) -> list[tuple[str, list[Turn]]]:
    async def run() -> list[tuple[str, list[Turn]]]:
        server = make_server(checkpoint)
        server._server_address = "127.0.0.1"  # else the host's own
        await server.launch_server()
        try:
            return await record(server)
        finally:
            server.engine.shutdown()

    return asyncio.run(run())


if __name__ == "__main__":
    run_engine(roll_out)
