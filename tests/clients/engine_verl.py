# SPDX-License-Identifier: Apache-2.0
"""verl's rollout server, `vLLMHttpServer`, around the vLLM of this environment. The variable RECIPE
has the command of the recipe, for its options.

The server runs in this process, not in a Ray actor, which would ask Ray for a GPU. Without Ray, the
one answer of it that the server needs, the name of the job, is made up.
"""

from __future__ import annotations

import asyncio
import os
import re
import uuid
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from driving import BEHAVIOURS, LENGTH, LONG, PROMPT, SETTINGS, Turn, make_turn

OPTIONS = [
    "dtype=float32",
    "enforce_eager=True",
    "load_format=auto",
    "tensor_model_parallel_size=1",
    f"max_model_len={LENGTH}",
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
    own = [f"engine_kwargs.vllm.{key}={value}" for key, value in SETTINGS.items()]
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


async def ask(server: Any, prompt: list[int], **sampling: Any) -> tuple[list[int], Any, str]:
    sampling = {"temperature": 0.0, "ignore_eos": True, "max_tokens": 9, **sampling}
    output = await server.generate(list(prompt), sampling, f"request-{uuid.uuid4()}")
    reason = "abort" if output.stop_reason == "aborted" else "length"
    return output.token_ids, output.routed_experts, reason


async def abort(server: Any, prompt: list[int]) -> Turn:
    """Abort a request after some tokens, as before a weight update."""
    asked = asyncio.create_task(ask(server, prompt, max_tokens=LONG))
    states = server.engine.output_processor.request_states
    while not any(state.detokenizer.num_output_tokens() > 8 for state in states.values()):
        assert not asked.done(), "the request ended before it was aborted"
        await asyncio.sleep(0.01)
    await server.abort_all_requests()
    answer = await asked
    await server.resume_generation()
    assert answer[2] == "abort", "the request ended before the abort"
    return make_turn(prompt, [answer])


def roll_out(checkpoint: str) -> Iterator[tuple[str, Iterable[Turn]]]:
    rng = np.random.default_rng(0)

    def say(length: int) -> list[int]:
        return rng.integers(4, 700, length).tolist()

    def send(prompt: list[int], start: int = 0, n: int = 1, seed: int = 0, **sampling: Any) -> Turn:
        asked = [ask(server, prompt, seed=seed + i, **sampling) for i in range(n)]
        return make_turn(prompt, [runner.run(answer) for answer in asked])

    def aborted() -> Iterator[Turn]:
        yield (turn := runner.run(abort(server, say(PROMPT))))
        yield send(turn.sequence)

    with asyncio.Runner() as runner:
        server = make_server(checkpoint)
        server._server_address = "127.0.0.1"  # else the host's own
        runner.run(server.launch_server())
        try:
            for behaviour in ("one turn", "several turns, resent", "n > 1", "prefix-cache hit"):
                yield behaviour, BEHAVIOURS[behaviour](SimpleNamespace(say=say, send=send))
            yield "abort and resume", aborted()
        finally:
            server.engine.shutdown()
