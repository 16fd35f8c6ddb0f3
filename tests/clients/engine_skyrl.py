# SPDX-License-Identifier: Apache-2.0
"""SkyRL's server around the vLLM of this environment, as its module `vllm_server_actor` runs on the
command line. The variable RECIPE has the lines of the recipe.

It runs in this process. SkyRL is made for Python 3.12, and asks Ray for a name in an annotation: it
gets a `TypedDict` that pydantic takes, and that name without Ray.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
import typing
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import httpx
import numpy as np
import orjson
import typing_extensions
from driving import BEHAVIOURS, SETTINGS, Turn, make_turn

OPTIONS = [
    "--dtype=float32",
    "--enforce-eager",
    "--kernel-config.enable_jit_warmup=false",  # for Triton's interpreter
    "--max-model-len=1024",
    "--max-num-seqs=8",
    "--enable-return-routed-experts",
    # SkyRL's default wants a GPU.
    "--worker-cls=vllm.v1.worker.cpu_worker.CPUWorker",
    *(f"--{name.replace('_', '-')}={value}" for name, value in SETTINGS.items()),
]


def import_server() -> Any:
    for name in ("ray", "ray.util", "ray.util.placement_group"):
        sys.modules[name] = ModuleType(name)
    sys.modules[name].PlacementGroup = object  # type: ignore[attr-defined]
    exec(os.environ["RECIPE"])
    typing.TypedDict = typing_extensions.TypedDict  # type: ignore[assignment]
    from skyrl.backends.skyrl_train.inference_servers import vllm_server_actor

    return vllm_server_actor


def roll_out(checkpoint: str) -> Iterator[tuple[str, Iterable[Turn]]]:
    skyrl = import_server()
    from skyrl.backends.skyrl_train.inference_servers.generate_wire import (
        decode_packed_routed_experts,
        load_packed_body,
    )

    # vLLM's processes would take Ray from there, which is for another Python.
    sys.path.remove(str(Path(skyrl.__file__).parents[4]))
    rng = np.random.default_rng(0)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}"

    def say(length: int) -> list[int]:
        return rng.integers(4, 700, length).tolist()

    async def ask(prompt: list[int], start: int, **sampling: Any) -> tuple[list[int], Any, str]:
        sampling = {"temperature": 0.0, "ignore_eos": True, "max_tokens": 9, **sampling}
        sampling["routed_experts_prompt_start"] = start
        body = {"token_ids": prompt, "sampling_params": sampling}
        async with httpx.AsyncClient(timeout=300) as client:
            response = await client.post(f"{url}/skyrl/v1/generate", content=orjson.dumps(body))
        response.raise_for_status()
        (choice,) = load_packed_body(response.content)["choices"]
        rows = decode_packed_routed_experts(choice["routed_experts"])
        return choice["token_ids"], rows, choice["finish_reason"]

    def send(prompt: list[int], start: int = 0, n: int = 1, seed: int = 0, **sampling: Any) -> Turn:
        asked = [ask(prompt, start, seed=seed + i, **sampling) for i in range(n)]
        return make_turn(prompt, [runner.run(answer) for answer in asked], start)

    async def until_healthy(server: asyncio.Task[None]) -> None:
        async with httpx.AsyncClient() as client:
            while True:
                if server.done():
                    server.result()
                try:
                    await client.get(f"{url}/health")
                    return
                except httpx.TransportError:
                    await asyncio.sleep(0.2)

    with asyncio.Runner() as runner:
        words = [f"--model={checkpoint}", "--host=127.0.0.1", f"--port={port}", *OPTIONS]
        arguments = skyrl._build_standalone_cli_args(words)
        serving = skyrl._build_and_serve_vllm_server(arguments)
        server = runner.get_loop().create_task(serving)
        try:
            runner.run(until_healthy(server))
            for behaviour in ("one turn", "several turns", "n > 1", "prefix-cache hit"):
                yield behaviour, BEHAVIOURS[behaviour](SimpleNamespace(say=say, send=send))
        finally:
            server.cancel()
