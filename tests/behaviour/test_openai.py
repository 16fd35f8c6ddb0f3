# SPDX-License-Identifier: Apache-2.0
"""`vllm serve`: who asks gets true rows, with the client of the `openai` package or with
`examples/client.py`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import torch
import transformers

from demos.replay import mismatch
from examples.client import Completion, generate, join
from harness.server import Server
from tests.behaviour.conftest import BLOCK, CHUNK, assert_true_completion, random_prompt

# Chunks of a stream carry this many tokens.
INTERVAL = 2
ASK = {"return_token_ids": True, "vllm_xargs": {"return_routed_experts": True}}
# The spelling of later releases and of SGLang.
ASK_ABOVE = {"return_token_ids": True, "return_routed_experts": True}


@pytest.fixture(scope="module")
def server(model: Path, line: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    arguments = ["--enable-return-routed-experts", "--routed-experts-opt-in", "--enforce-eager"]
    arguments += [f"--max-num-batched-tokens={CHUNK}", f"--stream-interval={INTERVAL}"]
    log = tmp_path_factory.mktemp("server") / "server.log"
    with Server(model, log=log, args=arguments, line=line) as server:
        yield server


def connect(url: str) -> openai.OpenAI:
    # The server would close a connection that is idle while the oracle runs.
    limits = httpx.Limits(max_keepalive_connections=0)
    http = httpx.Client(trust_env=False, timeout=300, limits=limits)
    return openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0, http_client=http)


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[openai.OpenAI]:
    with connect(server.url) as client:
        yield client


def read_choices(*parts: Any) -> dict[int, Completion]:
    """Choices that have tokens, by index, of one answer or of all chunks of a stream. Rows that
    belong to other tokens are an error."""
    choices: defaultdict[int, list[dict[str, Any]]] = defaultdict(list)
    # A chat's prompt stands beside its choices.
    prompt: list[int] = []
    for part in (part.model_dump() for part in parts):
        prompt = part.get("prompt_token_ids") or prompt
        for choice in part["choices"]:
            choices[choice["index"]].append({**choice, "token_ids": choice.get("token_ids")})
    return {
        index: join(chunks[0].get("prompt_token_ids") or prompt, [{"choices": chunks}])[0]
        for index, chunks in choices.items()
        if any(chunk["token_ids"] for chunk in chunks)
    }


def complete(
    client: openai.OpenAI, server: Server, prompt: list[int], body: Any = ASK, **options: Any
) -> Any:
    return client.completions.create(
        model=server.checkpoint,
        prompt=prompt,
        extra_body={"ignore_eos": True, **body},
        **{"temperature": 0.0, **options},
    )


def chat(client: openai.OpenAI, server: Server, text: str, body: Any = ASK, **options: Any) -> Any:
    return client.chat.completions.create(
        model=server.checkpoint,
        messages=[{"role": "user", "content": text}],
        extra_body={"ignore_eos": True, **body},
        **{"temperature": 0.0, **options},
    )


def words(seed: int, count: int) -> str:
    return " ".join(f"{n:x}" for n in random_prompt(seed, count))


def count_with_rows(parts: list[Any]) -> int:
    """How many choices of an answer or of the chunks of a stream have rows."""
    choices = [choice for part in parts for choice in part.choices]
    return sum(choice.model_extra.get("routed_experts") is not None for choice in choices)


SAMPLED = {"n": 2, "temperature": 1.0, "seed": 5, "max_tokens": 7}
USAGE = {"include_usage": True}


@pytest.mark.parametrize("is_chat", [False, True], ids=["completion", "chat"])
@pytest.mark.parametrize(
    "options",
    [{}, {"stream": True}, {"stream": True, "stream_options": USAGE}],
    ids=["whole", "stream", "stream with usage"],
)
def test_every_choice_has_true_rows(
    client: openai.OpenAI, server: Server, model: Path, is_chat: bool, options: dict[str, Any]
) -> None:
    send: Any = chat if is_chat else complete
    prompt: Any = words(2, 30) if is_chat else random_prompt(1, 2 * CHUNK + 3)
    reply = send(client, server, prompt, **SAMPLED, **options)
    parts = list(reply) if "stream" in options else [reply]
    assert (parts[-1].choices == []) == ("stream_options" in options)
    # Each chunk has the rows of its tokens.
    for end in range(1, len(parts)):
        read_choices(*parts[:end])
    assert (count_with_rows(parts) > 2) == ("stream" in options)
    choices = read_choices(*parts)
    assert len(choices) == 2
    for choice in choices.values():
        assert_true_completion(model, choice)


def test_every_prompt_of_a_list_has_its_rows(
    client: openai.OpenAI, server: Server, model: Path
) -> None:
    prompts: Any = [random_prompt(3, 20), random_prompt(4, 90)]
    choices = read_choices(complete(client, server, prompts, max_tokens=4))
    assert [[*choices[i].prompt] for i in (0, 1)] == prompts
    for choice in choices.values():
        assert_true_completion(model, choice)


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("is_chat", [False, True])
@pytest.mark.parametrize("above", [False, True], ids=["vllm_xargs", "top level"])
def test_rows_start_where_asked(
    client: openai.OpenAI, server: Server, model: Path, above: bool, is_chat: bool, is_stream: bool
) -> None:
    send: Any = chat if is_chat else complete
    prompt: Any = words(13, 9) if is_chat else random_prompt(13, BLOCK + 20)
    for start in (7,) if is_chat else (7, BLOCK + 1, len(prompt)):
        asks: Any = {"return_routed_experts": True, "routed_experts_prompt_start": start}
        body = {"return_token_ids": True, **(asks if above else {"vllm_xargs": asks})}
        reply = send(client, server, prompt, body, max_tokens=5, stream=is_stream)
        choices = read_choices(*reply) if is_stream else read_choices(reply)
        assert_true_completion(model, choices[0], start)


def test_mixed_requests_get_exactly_what_they_asked_for(
    client: openai.OpenAI, server: Server, model: Path
) -> None:
    rng = np.random.default_rng(10)
    lengths = rng.integers((1, 1), (200, 24), size=(48, 2)).tolist()

    def send(index: int) -> list[Any]:
        body = ASK if index % 2 else {"return_token_ids": True}
        length, max_tokens = lengths[index]
        options = {"max_tokens": max_tokens, "stream": index % 3 == 0}
        if index % 4 < 2:
            prompt = random_prompt(1000 + index, length)
            reply = complete(client, server, prompt, body, **options)
        else:
            reply = chat(client, server, words(1000 + index, length // 4), body, **options)
        return [*reply] if options["stream"] else [reply]

    with ThreadPoolExecutor(48) as pool:
        for index, parts in enumerate(pool.map(send, range(48))):
            if index % 2:
                (choice,) = read_choices(*parts).values()
                assert len(choice.token_ids) == lengths[index][1]
                assert_true_completion(model, choice)
            else:
                assert count_with_rows(parts) == 0


COUNTERS = ("rows", "bytes", "store_hits", "store_misses", "recomputed_tokens", "store_evictions")


def test_metrics_count_rows_and_store(client: openai.OpenAI, server: Server) -> None:
    prompt = random_prompt(12, 2 * BLOCK + 6)

    def read() -> dict[str, float]:
        return {n: server.metric(f"vllm:routed_experts_{n}_total") or 0.0 for n in COUNTERS}

    def count(body: dict[str, Any]) -> tuple[dict[str, float], Any]:
        before = read()
        answer = complete(client, server, prompt, body, max_tokens=5)
        after = read()
        return {n: after[n] - before[n] for n in COUNTERS if after[n] > before[n]}, answer

    counts, _ = count({})
    assert counts == {}
    # The silent request cached two blocks without rows.
    counts, answer = count(ASK)
    returned = {"rows": len(prompt) + 5 - 1, "bytes": read_choices(answer)[0].rows.nbytes}
    assert counts == {**returned, "store_misses": 2, "recomputed_tokens": 2 * BLOCK}
    counts, _ = count(ASK)
    assert counts == {**returned, "store_hits": 2}


@pytest.mark.parametrize("is_stream", [False, True])
def test_trainer_client_gets_true_rows_and_logprobs(
    server: Server, model: Path, is_stream: bool
) -> None:
    prompt = random_prompt(9, 60)
    params = {"n": 3, "temperature": 1.0, "seed": 5, "max_tokens": 9, "ignore_eos": True}
    completions = generate(
        server.url, prompt, {**params, "logprobs": 0}, start=10, stream=is_stream
    )
    assert len(completions) == 3
    for c in completions:
        assert c.finish_reason == "length"
        assert_true_completion(model, c, start=10)
    trainer = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    for replayed in (False, True):
        found = mismatch.measure(trainer, completions, replayed=replayed)
        assert len(found.deltas) == 27
        assert found.deltas == pytest.approx(0, abs=1e-4)
