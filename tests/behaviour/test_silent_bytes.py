# SPDX-License-Identifier: Apache-2.0
"""`vllm serve`: answers to silent requests equal those of the pristine server, byte for byte.

This needs vLLM without the series, which `make demo-pristine` builds.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from harness.server import Server
from tests.behaviour.conftest import pretend_amx, random_prompt
from tests.real import PROJECT

PRISTINE = PROJECT.build / "pristine" / "site"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PRISTINE.is_dir(), reason="no pristine build: make demo-pristine"),
    pytest.mark.skipif(
        not torch.cpu._is_avx512_supported(), reason="the release needs AVX-512 for this model"
    ),
]

MESSAGES = [{"role": "user", "content": "abc"}]
COMMON = {"temperature": 0.0, "max_tokens": 6, "ignore_eos": True}
# Ids are random, and time passes.
CHANGING = re.compile(rb'"(id|request_id|created|system_fingerprint)":("[^"]*"|\d+|null)')
COMPLETION = {"prompt": random_prompt(1, 40), "logprobs": 2, **COMMON}
CHAT = {"messages": MESSAGES, "logprobs": True, "top_logprobs": 2, **COMMON}
GENERATE = {"token_ids": random_prompt(2, 40), "sampling_params": {**COMMON, "logprobs": 1}}
REQUESTS: dict[str, tuple[str, dict[str, Any]]] = {
    "completion": ("/v1/completions", COMPLETION),
    "completions, n": ("/v1/completions", {**COMPLETION, "n": 3, "seed": 1, "temperature": 1.0}),
    "completion, echo": ("/v1/completions", {**COMPLETION, "echo": True}),
    "completion, streamed": (
        "/v1/completions",
        {**COMPLETION, "stream": True, "stream_options": {"include_usage": True}},
    ),
    "chat": ("/v1/chat/completions", CHAT),
    "chat, streamed": (
        "/v1/chat/completions",
        {**CHAT, "stream": True, "stream_options": {"include_usage": True}},
    ),
    "generate": ("/inference/v1/generate", GENERATE),
    "generate, streamed": ("/inference/v1/generate", {**GENERATE, "stream": True}),
    "refused": ("/v1/completions", {**COMPLETION, "max_tokens": -1}),
}


def answer(server: Server, path: str, body: dict[str, Any]) -> tuple[int, bytes]:
    reply = httpx.post(
        server.url + path, json={"model": server.checkpoint, **body}, timeout=120, trust_env=False
    )
    return reply.status_code, CHANGING.sub(rb'"\1":0', reply.content)


@pytest.fixture(scope="module")
def answers(
    checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, dict[str, tuple[int, bytes]]]:
    """The answers of each server by request. One server runs after the other."""
    model = checkpoint()
    # The release cannot start this model on a CPU with AMX.
    plugin = tmp_path_factory.mktemp("amx")
    pretend_amx(plugin, False)
    setups: dict[str, tuple[list[str], list[Path]]] = {
        "pristine": ([], [PRISTINE, plugin]),
        "patched": (["--enable-return-routed-experts", "--routed-experts-opt-in"], [plugin]),
    }
    found: dict[str, dict[str, tuple[int, bytes]]] = {}
    for name, (arguments, paths) in setups.items():
        env = {"PYTHONPATH": os.pathsep.join(map(str, paths))}
        log = tmp_path_factory.mktemp(name) / "server.log"
        with Server(model, log=log, args=arguments, env=env) as server:
            version = httpx.get(server.url + "/version", trust_env=False, timeout=60).json()[
                "version"
            ]
            # The pristine build is number 0.
            assert ("+re.0." in version) == (name == "pristine"), version
            found[name] = {
                request: answer(server, path, body) for request, (path, body) in REQUESTS.items()
            }
    return found


@pytest.mark.parametrize("request_name", REQUESTS)
def test_silent_answer_is_the_pristine_one(
    answers: dict[str, dict[str, tuple[int, bytes]]], request_name: str
) -> None:
    pristine, patched = answers["pristine"][request_name], answers["patched"][request_name]
    assert patched == pristine
    if request_name != "refused":
        assert pristine[0] == 200
        assert len(pristine[1]) > 100
    else:
        assert "max_tokens" in json.dumps(pristine[1].decode())
