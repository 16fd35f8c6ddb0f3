# SPDX-License-Identifier: Apache-2.0
"""A prefill and a decode engine of this line that share KV through files, behind the proxy.

Prompts are those of the first line's `tests/behaviour/test_disaggregated_engines.py`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from examples import proxy
from examples.client import decode_rows, generate
from harness import disaggregated
from harness.disaggregated import Pair
from tests.behaviour.conftest import BLOCK, assert_rows, random_prompt
from tests.behaviour.test_disaggregated_engines import LENGTHS, MAX_TOKENS, PROMPTS, post

pytestmark = pytest.mark.slow

LINE = Path(__file__).parent.name
GREEDY = {"temperature": 0.0, "ignore_eos": True}


@pytest.fixture(scope="module")
def pair(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    folder = tmp_path_factory.mktemp("disaggregated")
    way = disaggregated.files(folder / "kv")
    with disaggregated.running(model, folder, way, LINE) as pair:
        yield pair


def test_joined_rows_are_true(pair: Pair, model: Path) -> None:
    before = pair.decode.metric(disaggregated.RECEIVED) or 0
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        answers = list(
            pool.map(
                lambda prompt: generate(pair.url, prompt, {**GREEDY, "max_tokens": MAX_TOKENS}),
                PROMPTS,
            )
        )
    blocks = [(length - 1) // BLOCK for length in LENGTHS]
    assert (pair.decode.metric(disaggregated.RECEIVED) or 0) - before == BLOCK * sum(blocks)
    for prompt, (completion,) in zip(PROMPTS, answers, strict=True):
        assert completion.start == 0
        assert_rows(model, [*prompt, *completion.token_ids], completion.rows)


@pytest.mark.parametrize("start", [0, BLOCK, 3 * BLOCK + 2])
def test_decode_engine_states_where_its_rows_begin(pair: Pair, model: Path, start: int) -> None:
    prompt = random_prompt(30 + start, 3 * BLOCK + 7)
    generate(pair.prefill.url, prompt, {**GREEDY, "max_tokens": 1})
    body: dict[str, Any] = {
        "token_ids": prompt,
        "sampling_params": {**GREEDY, "max_tokens": 5, "routed_experts_prompt_start": start},
        "kv_transfer_params": {"do_remote_prefill": True},
    }
    answer = pair.decode.post(proxy.GENERATE, body)["choices"][0]
    begin = max(start, 3 * BLOCK)
    assert answer["routed_experts_start"] == begin
    rows = decode_rows(answer["routed_experts"])
    assert_rows(model, [*prompt, *answer["token_ids"]], rows, begin)


def test_streamed_completion_is_joined(pair: Pair, model: Path) -> None:
    prompt = random_prompt(40, 2 * BLOCK + 9)
    more = {"return_token_ids": True, "stream": True, "return_routed_experts": True}
    body = {"model": pair.prefill.checkpoint, "prompt": prompt, "max_tokens": 5, **GREEDY, **more}
    lines = post(pair.url, "/v1/completions", body).text.splitlines()
    events = [line.removeprefix("data: ") for line in lines if line.startswith("data: {")]
    choices = [choice for event in events for choice in json.loads(event)["choices"]]
    tokens, rows = list(prompt), []
    for choice in choices:
        tokens += choice["token_ids"] or []
        if choice.get("routed_experts") is not None:
            assert choice["routed_experts_start"] == sum(map(len, rows))
            rows.append(decode_rows(choice["routed_experts"]))
    assert len(tokens) == len(prompt) + 5
    assert_rows(model, tokens, np.concatenate(rows))
