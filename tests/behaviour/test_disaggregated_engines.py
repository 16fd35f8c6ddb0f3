# SPDX-License-Identifier: Apache-2.0
"""A prefill and a decode engine share KV through files, and a proxy asks both: answers have true
rows. With NIXL beside the files (MultiConnector), the prompt's rows travel in the parameters that
NIXL returns. NIXL alone: test_nixl.py."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from examples import proxy
from examples.client import decode_rows, generate
from harness import disaggregated
from harness.disaggregated import Pair
from tests.behaviour.conftest import (
    BLOCK,
    assert_rows,
    assert_true_completion,
    random_prompt,
)
from tests.behaviour.test_nixl import CASES, GREEDY, ask_generate

pytestmark = pytest.mark.slow

WAYS = {"files": disaggregated.files, "files and NIXL": disaggregated.both}
FILES = pytest.mark.parametrize("pair", ["files"], indirect=True)


@pytest.fixture(scope="module", params=WAYS)
def pair(
    request: pytest.FixtureRequest, model: Path, line: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Pair]:
    folder = tmp_path_factory.mktemp("disaggregated")
    way = WAYS[request.param](folder / "kv")
    with disaggregated.running(model, folder, way, line) as pair:
        yield pair


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_answer_has_every_row_from_the_asked_one_on(pair: Pair, model: Path, stream: bool) -> None:
    before = pair.decode.metric(disaggregated.RECEIVED) or 0
    with ThreadPoolExecutor(len(CASES)) as pool:
        list(pool.map(lambda case: ask_generate(pair, model, case, 1000 * stream, stream), CASES))
    received = (pair.decode.metric(disaggregated.RECEIVED) or 0) - before
    if any("NixlConnector" in word for word in pair.decode.command):
        assert received > 0
        assert pair.decode.metric("vllm:nixl_bytes_transferred_sum")
    else:
        # Files have whole blocks, and never the last token.
        assert received == sum((case.length - 1) // BLOCK * BLOCK for case in CASES)


@FILES
@pytest.mark.parametrize("stream", [False, True])
def test_every_choice_of_a_group_has_all_rows(pair: Pair, model: Path, stream: bool) -> None:
    prompt = random_prompt(10 + stream, 3 * BLOCK + 7)
    sampling = {"n": 3, "temperature": 1.0, "seed": 1, "ignore_eos": True, "max_tokens": 7}
    completions = generate(pair.url, prompt, sampling, stream=stream)
    assert len({completion.token_ids for completion in completions}) == 3
    for completion in completions:
        assert_true_completion(model, completion)


@FILES
@pytest.mark.parametrize("start", [0, BLOCK, 3 * BLOCK + 2])
def test_decode_engine_states_where_its_rows_begin(pair: Pair, model: Path, start: int) -> None:
    prompt = random_prompt(30 + start, 3 * BLOCK + 7)
    generate(pair.prefill.url, prompt, {**GREEDY, "max_tokens": 1})
    asks = {"return_routed_experts": True, "routed_experts_prompt_start": start}
    body: dict[str, Any] = {
        "token_ids": prompt,
        "sampling_params": {**GREEDY, "max_tokens": 5, **asks},
        "kv_transfer_params": {"do_remote_prefill": True},
    }
    answer = pair.decode.post(proxy.GENERATE, body)["choices"][0]
    begin = max(start, 3 * BLOCK)
    assert answer["routed_experts_start"] == begin
    rows = decode_rows(answer["routed_experts"])
    assert_rows(model, [*prompt, *answer["token_ids"]], rows, begin)


@FILES
def test_rows_of_two_prompts_begin_after_the_received_kv(pair: Pair, model: Path) -> None:
    prompts = [random_prompt(40 + i, 2 * BLOCK + 9) for i in range(2)]
    more = {"n": 2, "seed": 1, "return_token_ids": True, "return_routed_experts": True}
    body = {"model": pair.prefill.checkpoint, "prompt": prompts, "max_tokens": 5, **more}
    choices = pair.decode.post("/v1/completions", body, url=pair.url)["choices"]
    assert len(choices) == 4
    for choice in choices:
        assert choice["routed_experts_start"] == 2 * BLOCK
        tokens = [*prompts[choice["index"] // 2], *choice["token_ids"]]
        assert_rows(model, tokens, decode_rows(choice["routed_experts"]), 2 * BLOCK)
