# SPDX-License-Identifier: Apache-2.0
"""A prefill and a decode engine of this line send KV with NIXL, from memory to memory over sockets,
behind `examples/proxy.py` and vLLM's own proxy.

Most tests and prompts are those of the first line's `tests/behaviour/test_nixl.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from examples.client import Completion, generate
from harness import disaggregated
from harness.disaggregated import Pair
from tests.behaviour.conftest import assert_rows
from tests.behaviour.test_nixl import (
    GREEDY,
    LENGTHS,
    PROMPTS,
    plain,
    test_answer_has_every_row_from_the_asked_one_on,
    test_rows_that_cannot_be_used_are_refused_with_400,
    test_rows_that_the_decode_engine_computed_before_join_those_of_the_prefill_engine,
    test_soak_leaves_nothing_behind,
)

# These run here as they are.
__all__ = [
    "plain",
    "test_answer_has_every_row_from_the_asked_one_on",
    "test_rows_that_cannot_be_used_are_refused_with_400",
    "test_rows_that_the_decode_engine_computed_before_join_those_of_the_prefill_engine",
    "test_soak_leaves_nothing_behind",
]

pytestmark = pytest.mark.slow

LINE = Path(__file__).parent.name
# The rest of a block that was received in part, and the next one.
MAX_TOKENS = 40


@pytest.fixture(scope="module")
def pair(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    folder = tmp_path_factory.mktemp("nixl")
    with disaggregated.running(model, folder, disaggregated.nixl, LINE) as pair:
        yield pair


def complete(url: str, prompt: list[int]) -> Completion:
    (completion,) = generate(url, prompt, {**GREEDY, "max_tokens": MAX_TOKENS})
    assert completion.start == 0
    return completion


def test_joined_rows_are_true_and_received_blocks_are_computed_for_others(
    pair: Pair, model: Path
) -> None:
    before = pair.decode.metric(disaggregated.RECEIVED) or 0
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        joined = list(pool.map(lambda prompt: complete(pair.url, prompt), PROMPTS))
    assert (pair.decode.metric(disaggregated.RECEIVED) or 0) - before == sum(LENGTHS)
    assert pair.decode.metric("vllm:nixl_bytes_transferred_sum")
    alone = [complete(pair.decode.url, prompt) for prompt in PROMPTS]
    for prompt, *completions in zip(PROMPTS, joined, alone, strict=True):
        for completion in completions:
            assert_rows(model, [*prompt, *completion.token_ids], completion.rows)
