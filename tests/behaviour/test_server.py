# SPDX-License-Identifier: Apache-2.0
"""`vllm serve`: /inference/v1/generate returns the rows of its tokens, also to silent requests."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
import transformers

from demos.replay import mismatch
from examples import client
from examples.client import decode_rows
from harness.server import Answer, Server, read_answer
from tests.behaviour.conftest import CHUNK, assert_rows, random_prompt

MESSAGES = [{"role": "user", "content": "abc"}]


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    arguments = ["--enable-return-routed-experts", f"--max-num-batched-tokens={CHUNK}"]
    log = tmp_path_factory.mktemp("server") / "server.log"
    with Server(model, log=log, args=arguments) as server:
        yield server


def assert_true_answer(model: Path, answer: Answer) -> None:
    assert answer.rows is not None
    assert_rows(model, [*answer.prompt, *answer.token_ids], answer.rows, answer.start)


def request(server: Server, prompt: list[int], **sampling: Any) -> dict[str, Any]:
    return {
        "model": server.checkpoint,
        "token_ids": prompt,
        "sampling_params": {"temperature": 0.0, "ignore_eos": True, **sampling},
    }


def stream(server: Server, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The first choice of every chunk."""
    body = {**body, "stream": True}
    with httpx.stream("POST", server.url + "/inference/v1/generate", json=body) as reply:
        for line in reply.iter_lines():
            data = line.removeprefix("data: ")
            if data and data != "[DONE]":
                yield json.loads(data)["choices"][0]


def test_answer_has_true_rows(server: Server, model: Path) -> None:
    prompt = random_prompt(1, 3 * CHUNK)
    assert_true_answer(model, server.generate(prompt, max_tokens=9, ignore_eos=True))


def test_every_choice_has_its_rows(server: Server, model: Path) -> None:
    prompt = random_prompt(2, 70)
    body = request(server, prompt, n=3, temperature=1.0, seed=3, max_tokens=7)
    reply = server.post("/inference/v1/generate", body)
    assert len(reply["choices"]) == 3
    for choice in reply["choices"]:
        assert_true_answer(model, read_answer(prompt, {"choices": [choice]}))
        assert choice["num_prompt_tokens"] == 70
        # All layers of this model have the same top-k.
        assert "moe_top_k" not in choice


def test_chunks_of_a_stream_carry_the_rows_of_their_tokens(server: Server, model: Path) -> None:
    prompt = random_prompt(3, 2 * CHUNK + 9)
    token_ids: list[int] = []
    rows: list[np.ndarray] = []
    for chunk in stream(server, request(server, prompt, max_tokens=9)):
        assert chunk["routed_experts_start"] == sum(map(len, rows))
        assert chunk["num_prompt_tokens"] == len(prompt)
        token_ids += chunk["token_ids"]
        rows.append(decode_rows(chunk["routed_experts"]))
        assert sum(map(len, rows)) == len(prompt) + len(token_ids) - 1
    answer = Answer(tuple(prompt), tuple(token_ids), np.concatenate(rows), 0, (0, 2, 3))
    assert_true_answer(model, answer)


def test_concurrent_requests_have_their_own_rows(server: Server, model: Path) -> None:
    rng = np.random.default_rng(4)
    lengths = [(int(p), int(o)) for p, o in rng.integers(1, (150, 20), size=(24, 2))]

    def ask(index: int) -> Answer:
        prompt_len, max_tokens = lengths[index]
        prompt = random_prompt(100 + index, prompt_len)
        return server.generate(prompt, max_tokens=max_tokens, ignore_eos=True)

    with ThreadPoolExecutor(12) as pool:
        for answer in pool.map(ask, range(len(lengths))):
            assert_true_answer(model, answer)


def test_client_that_goes_away_disturbs_nobody(server: Server, model: Path) -> None:
    prompt = random_prompt(5, 100)
    chunks = stream(server, request(server, prompt, max_tokens=400))
    next(chunks)
    chunks.close()  # type: ignore[attr-defined]
    # The same prefix: its blocks were filled by the request that went away.
    assert_true_answer(model, server.generate(prompt, max_tokens=5, ignore_eos=True))


@pytest.mark.parametrize(
    ("path", "body", "counts"),
    [
        ("/v1/completions", {"prompt": "abc"}, True),
        ("/v1/chat/completions", {"messages": MESSAGES}, True),
        ("/v1/completions", {"prompt": "abc", "use_beam_search": True}, False),
        ("/v1/chat/completions/batch", {"messages": [MESSAGES]}, False),
        ("/v1/messages", {"messages": MESSAGES}, False),
        ("/v1/responses", {"input": "abc", "max_output_tokens": 3}, False),
    ],
)
def test_silent_request_counts_as_asking_where_the_answer_has_room(
    server: Server, path: str, body: dict[str, Any], counts: bool
) -> None:
    name = "vllm:routed_experts_rows_total"
    before = server.metric(name)
    answer = server.post(path, {"model": server.checkpoint, "max_tokens": 3, **body})
    assert ("routed_experts" in json.dumps(answer)) == counts
    assert (server.metric(name) != before) == counts


# Where the arguments may stand.
SPELLINGS: dict[str, Callable[[dict[str, Any], dict[str, Any]], dict[str, Any]]] = {
    "extra_args": lambda body, arguments: {
        **body,
        "sampling_params": {**body["sampling_params"], "extra_args": arguments},
    },
    "sampling_params": lambda body, arguments: {
        **body,
        "sampling_params": {**body["sampling_params"], **arguments},
    },
    "top level": lambda body, arguments: {**body, **arguments},
}


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_rows_start_where_asked(
    server: Server, model: Path, spelling: str, is_stream: bool
) -> None:
    prompt = random_prompt(12, 50)
    body = request(server, prompt, max_tokens=4)
    body = SPELLINGS[spelling](body, {"routed_experts_prompt_start": 33})
    if is_stream:
        parts = list(stream(server, body))
    else:
        parts = server.post("/inference/v1/generate", body)["choices"]
    assert parts[0]["routed_experts_start"] == 33
    rows = np.concatenate([decode_rows(part["routed_experts"]) for part in parts])
    assert_rows(model, [*prompt, *(t for part in parts for t in part["token_ids"])], rows, 33)


# Many more values: test_fuzz.py.
@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize(
    "arguments",
    [
        {"return_routed_experts": "yes"},
        {"routed_experts_prompt_start": 21},
        {"routed_experts_prompt_start": 2**65},
        {"routed_experts_prompt_start": True},
    ],
    ids=str,
)
def test_bad_argument_is_a_400_that_names_it(
    server: Server, model: Path, arguments: dict[str, Any], spelling: str, is_stream: bool
) -> None:
    prompt = random_prompt(14, 20)
    body = SPELLINGS[spelling](request(server, prompt, max_tokens=2), arguments)
    url = server.url + "/inference/v1/generate"
    reply = httpx.post(url, json={**body, "stream": is_stream}, timeout=60)
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == next(iter(arguments))
    assert_true_answer(model, server.generate(prompt, max_tokens=2, ignore_eos=True))


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("spelling", ["sampling_params", "top level"])
@pytest.mark.parametrize(
    ("name", "value", "other"),
    [("return_routed_experts", True, 0), ("routed_experts_prompt_start", 1, 2)],
)
def test_spellings_that_differ_are_a_400(
    server: Server, spelling: str, name: str, value: int, other: int, is_stream: bool
) -> None:
    body = request(server, random_prompt(15, 20), extra_args={name: other}, max_tokens=2)
    body = {**SPELLINGS[spelling](body, {name: value}), "stream": is_stream}
    reply = httpx.post(server.url + "/inference/v1/generate", json=body, timeout=60)
    assert reply.status_code == 400
    assert f"{name} is given twice" in reply.text


@pytest.mark.parametrize("spelling", ["sampling_params", "top level"])
def test_null_is_as_good_as_silence(server: Server, model: Path, spelling: str) -> None:
    prompt = random_prompt(16, 20)
    null = {"return_routed_experts": None, "routed_experts_prompt_start": None}
    body = SPELLINGS[spelling](request(server, prompt, extra_args=null, max_tokens=2), null)
    answer = read_answer(prompt, server.post("/inference/v1/generate", body))
    assert answer.start == 0
    assert_true_answer(model, answer)


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_request_may_decline(server: Server, spelling: str) -> None:
    body = SPELLINGS[spelling](
        request(server, random_prompt(8, 20)), {"return_routed_experts": False}
    )
    (choice,) = server.post("/inference/v1/generate", body)["choices"]
    assert not [name for name in choice if "experts" in name or "moe" in name]
    assert "num_prompt_tokens" not in choice


@pytest.mark.parametrize("is_stream", [False, True])
def test_trainer_client_gets_true_rows_and_logprobs(
    server: Server, model: Path, is_stream: bool
) -> None:
    prompt = random_prompt(9, 60)
    params = {"n": 3, "temperature": 1.0, "seed": 5, "max_tokens": 9, "ignore_eos": True}
    completions = client.generate(
        server.url, prompt, {**params, "logprobs": 0}, start=10, stream=is_stream
    )
    assert len(completions) == 3
    for c in completions:
        assert_true_answer(model, Answer(c.prompt, c.token_ids, c.rows, c.start, c.moe_layers))
        assert c.start == 10
        assert c.finish_reason == "length"
    trainer = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    for replayed in (False, True):
        found = mismatch.measure(trainer, completions, replayed=replayed)
        assert len(found.deltas) == 27
        assert found.deltas == pytest.approx(0, abs=1e-4)


def test_trainer_client_tells_the_servers_refusal(server: Server) -> None:
    with pytest.raises(client.RoutedExpertsError, match=r"answered 400: .*integer from 0 to 20"):
        client.generate(server.url, random_prompt(10, 20), {"max_tokens": 2}, start=21)
