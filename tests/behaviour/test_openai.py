# SPDX-License-Identifier: Apache-2.0
"""`vllm serve`: the OpenAI endpoints return the rows of those that ask, read with the client
of the `openai` package."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest

from examples.client import decode_rows
from harness import oracle
from harness.server import Server
from tests.behaviour.conftest import BLOCK, CHUNK, assert_rows, random_prompt

# Chunks of a stream carry this many tokens.
INTERVAL = 2
FIELDS = {"routed_experts", "routed_experts_start", "moe_layers", "num_prompt_tokens"}
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


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[openai.OpenAI]:
    # The server would close a connection that is idle while the oracle runs.
    limits = httpx.Limits(max_keepalive_connections=0)
    http = httpx.Client(trust_env=False, timeout=120, limits=limits)
    with openai.OpenAI(
        base_url=server.url + "/v1", api_key="none", max_retries=0, http_client=http
    ) as client:
        yield client


@dataclass
class Choice:
    """One choice of an answer, whole or collected from a stream's chunks."""

    prompt: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    rows: list[np.ndarray] = field(default_factory=list)
    start: int | None = None
    moe_layers: list[int] | None = None
    num_prompt_tokens: int | None = None

    def add(self, choice: Any) -> None:
        self.prompt += getattr(choice, "prompt_token_ids", None) or []
        self.token_ids += getattr(choice, "token_ids", None) or []
        # On v0.33.0, an answer without rows may have null.
        present = {name for name in FIELDS if choice.model_extra.get(name) is not None}
        if not present:
            return
        assert present == FIELDS
        if self.start is None:
            self.start, self.moe_layers = choice.routed_experts_start, choice.moe_layers
            self.num_prompt_tokens = choice.num_prompt_tokens
        assert choice.routed_experts_start == self.start + sum(map(len, self.rows))
        assert choice.moe_layers == self.moe_layers
        assert choice.num_prompt_tokens == self.num_prompt_tokens
        self.rows.append(decode_rows(choice.routed_experts))

    def assert_true(self, model: Path, start: int = 0) -> None:
        """Every position from `start` on but the last has the oracle's row."""
        assert self.start == start
        assert self.num_prompt_tokens == len(self.prompt)
        tokens = [*self.prompt, *self.token_ids]
        assert self.moe_layers == list(oracle.route(model, tokens).layers)
        assert_rows(model, tokens, np.concatenate(self.rows), start)


def collect(*parts: Any) -> dict[int, Choice]:
    """Choices, by index, of one answer or of all chunks of a stream."""
    choices: defaultdict[int, Choice] = defaultdict(Choice)
    prompt: list[int] = []
    for part in parts:
        # A chat's prompt stands beside its choices.
        prompt = getattr(part, "prompt_token_ids", None) or prompt
        for choice in part.choices:
            choices[choice.index].add(choice)
    for choice in choices.values():
        choice.prompt = choice.prompt or prompt
    return dict(choices)


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
        for choice in collect(*parts[:end]).values():
            if choice.token_ids:
                num_tokens = len(choice.prompt) + len(choice.token_ids)
                assert sum(map(len, choice.rows)) == num_tokens - 1
    choices = collect(*parts)
    assert len(choices) == 2
    for choice in choices.values():
        assert (len(choice.rows) > 1) == ("stream" in options)
        choice.assert_true(model)


def test_every_prompt_of_a_list_has_its_rows(
    client: openai.OpenAI, server: Server, model: Path
) -> None:
    prompts: Any = [random_prompt(3, 20), random_prompt(4, 90)]
    choices = collect(complete(client, server, prompts, max_tokens=4))
    assert [choices[i].prompt for i in (0, 1)] == prompts
    for choice in choices.values():
        choice.assert_true(model)


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("is_chat", [False, True])
@pytest.mark.parametrize("above", [False, True], ids=["vllm_xargs", "top level"])
def test_rows_start_where_asked(
    client: openai.OpenAI,
    server: Server,
    model: Path,
    above: bool,
    is_chat: bool,
    is_stream: bool,
) -> None:
    send: Any = chat if is_chat else complete
    prompt: Any = words(13, 9) if is_chat else random_prompt(13, BLOCK + 20)
    for start in (7,) if is_chat else (7, BLOCK + 1, len(prompt)):
        asks: Any = {"return_routed_experts": True, "routed_experts_prompt_start": start}
        body = {"return_token_ids": True, **(asks if above else {"vllm_xargs": asks})}
        reply = send(client, server, prompt, body, max_tokens=5, stream=is_stream)
        choices = collect(*reply) if is_stream else collect(reply)
        choices[0].assert_true(model, start)


def test_mixed_requests_get_exactly_what_they_asked_for(
    client: openai.OpenAI, server: Server, model: Path
) -> None:
    rng = np.random.default_rng(10)
    lengths = rng.integers((1, 1), (200, 24), size=(48, 2)).tolist()

    def send(index: int) -> dict[int, Choice]:
        body = ASK if index % 2 else {"return_token_ids": True}
        length, max_tokens = lengths[index]
        options = {"max_tokens": max_tokens, "stream": index % 3 == 0}
        if index % 4 < 2:
            prompt = random_prompt(1000 + index, length)
            reply = complete(client, server, prompt, body, **options)
        else:
            reply = chat(client, server, words(1000 + index, length // 4), body, **options)
        return collect(*reply) if options["stream"] else collect(reply)

    with ThreadPoolExecutor(48) as pool:
        for index, choices in enumerate(pool.map(send, range(48))):
            assert len(choices[0].token_ids) == lengths[index][1]
            if index % 2:
                choices[0].assert_true(model)
            else:
                assert choices[0].rows == []


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
    (rows,) = collect(answer)[0].rows
    returned = {"rows": len(prompt) + 5 - 1, "bytes": rows.nbytes}
    assert counts == {**returned, "store_misses": 2, "recomputed_tokens": 2 * BLOCK}
    counts, _ = count(ASK)
    assert counts == {**returned, "store_hits": 2}
