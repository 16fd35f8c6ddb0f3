# SPDX-License-Identifier: Apache-2.0
"""The loads of the benchmark."""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from typing import Any

GENERATE, CHAT = "/inference/v1/generate", "/v1/chat/completions"
TOP_K = 8


@dataclass(frozen=True)
class Load:
    """Requests that start together, and the outputs of the engine for them, 5 ms a step."""

    name: str
    path: str
    stream: bool
    prompt: int  # in the engine; its rows come with the first tokens. A shorter one is sent
    steps: int
    tokens: int  # of each request in a step
    requests: int = 1
    stalled: bool = False  # readers read nothing until the engine has finished

    @property
    def output(self) -> int:
        return self.steps * self.tokens

    def body(self, asks: bool) -> bytes:
        arguments = {"return_routed_experts": asks}
        common = {"max_tokens": self.output, "ignore_eos": True}
        body: dict[str, Any] = {"stream": self.stream}
        if self.path == CHAT:
            body |= {"messages": [{"role": "user", "content": "abc"}], "vllm_xargs": arguments}
            body |= common
        else:
            body |= {"token_ids": [5], "sampling_params": {**common, "extra_args": arguments}}
        return json.dumps(body).encode()


def loads_of(arguments: argparse.Namespace) -> list[Load]:
    prompt = arguments.prompt
    steps = arguments.steps
    readers = arguments.readers
    answers = [
        Load(f"{name}{', streamed' if stream else ''}", path, stream, prompt, steps, tokens=128)
        for name, path in (("generate", GENERATE), ("chat", CHAT))
        for stream in (False, True)
    ]
    # The first event of each stream is larger than the socket buffers of a stalled reader.
    prompt = 3_200_000 // (arguments.layers * TOP_K)
    stalled = Load(
        f"{readers} stalled readers", GENERATE, True, prompt, 8 * steps, 2, readers, stalled=True
    )
    return [*answers, stalled]
