# SPDX-License-Identifier: Apache-2.0
"""`vllm serve` of this line: completions and chat, whole and streamed, return true rows.

Requests and helpers are those of the first line's `tests/behaviour/test_openai.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from harness.server import Server
from tests.behaviour.conftest import BLOCK, CHUNK, random_prompt
from tests.behaviour.test_openai import (
    ASK_ABOVE,
    INTERVAL,
    SAMPLED,
    chat,
    collect,
    complete,
    test_rows_of_text_that_is_kept_back_wait,
    words,
)

# This test runs here as it is.
__all__ = ["test_rows_of_text_that_is_kept_back_wait"]

pytestmark = pytest.mark.slow

LINE = Path(__file__).parent.name


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    arguments = ["--enable-return-routed-experts", "--routed-experts-opt-in", "--enforce-eager"]
    arguments += [f"--max-num-batched-tokens={CHUNK}", f"--stream-interval={INTERVAL}"]
    arguments += ["--enable-auto-tool-choice", "--tool-call-parser=hermes"]
    log = tmp_path_factory.mktemp("server") / "server.log"
    with Server(model, log=log, args=arguments, line=LINE) as server:
        yield server


@pytest.mark.parametrize("is_chat", [False, True], ids=["completion", "chat"])
def test_every_choice_of_a_stream_has_true_rows_in_its_chunks(
    client: openai.OpenAI, server: Server, model: Path, is_chat: bool
) -> None:
    send: Any = chat if is_chat else complete
    prompt: Any = words(2, 30) if is_chat else random_prompt(1, 2 * CHUNK + 3)
    chunks = list(send(client, server, prompt, ASK_ABOVE, stream=True, **SAMPLED))
    for end in range(1, len(chunks)):
        for choice in collect(*chunks[:end]).values():
            if choice.token_ids:
                num_tokens = len(choice.prompt) + len(choice.token_ids)
                assert sum(map(len, choice.rows)) == num_tokens - 1
    choices = collect(*chunks)
    assert len(choices) == 2
    for choice in choices.values():
        assert len(choice.rows) > 1
        choice.assert_true(model)


@pytest.mark.parametrize("is_chat", [False, True], ids=["completion", "chat"])
def test_every_choice_of_a_whole_answer_has_true_rows(
    client: openai.OpenAI, server: Server, model: Path, is_chat: bool
) -> None:
    send: Any = chat if is_chat else complete
    prompt: Any = words(2, 30) if is_chat else [random_prompt(3, 20), random_prompt(4, 90)]
    choices = collect(send(client, server, prompt, ASK_ABOVE, **SAMPLED))
    assert len(choices) == (2 if is_chat else 4)
    for choice in choices.values():
        choice.assert_true(model)


def test_rows_of_a_stream_start_where_asked(
    client: openai.OpenAI, server: Server, model: Path
) -> None:
    prompt = random_prompt(8, BLOCK + 20)
    for start in (BLOCK + 1, len(prompt)):
        body = {**ASK_ABOVE, "routed_experts_prompt_start": start}
        chunks = complete(client, server, prompt, body, max_tokens=3, stream=True)
        collect(*chunks)[0].assert_true(model, start=start)


def test_stream_that_does_not_ask_has_no_rows(client: openai.OpenAI, server: Server) -> None:
    body = {"return_token_ids": True}
    chunks = complete(client, server, random_prompt(9, 20), body, max_tokens=3, stream=True)
    assert collect(*chunks)[0].rows == []


COUNTERS = ("rows", "bytes", "store_hits", "store_misses", "recomputed_tokens")


def test_metrics_count_rows_and_store(client: openai.OpenAI, server: Server) -> None:
    prompt = random_prompt(12, 2 * BLOCK + 6)

    def read() -> dict[str, float]:
        counts = {name: server.metric(f"vllm:routed_experts_{name}_total") for name in COUNTERS}
        return {name: count for name, count in counts.items() if count is not None}

    def count(body: dict[str, Any]) -> tuple[dict[str, float], Any]:
        before = read()
        answer = complete(client, server, prompt, body, max_tokens=5)
        after = read()
        assert after.keys() == set(COUNTERS)
        return {n: after[n] - before[n] for n in COUNTERS if after[n] > before[n]}, answer

    counts, _ = count({})
    assert counts == {}
    # The silent request cached two blocks without rows.
    counts, answer = count(ASK_ABOVE)
    (rows,) = collect(answer)[0].rows
    returned = {"rows": len(prompt) + 5 - 1, "bytes": rows.nbytes}
    assert counts == {**returned, "store_misses": 2, "recomputed_tokens": 2 * BLOCK}
    counts, _ = count(ASK_ABOVE)
    assert counts == {**returned, "store_hits": 2}
