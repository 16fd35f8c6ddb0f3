# SPDX-License-Identifier: Apache-2.0
"""A prefill and a decode engine of this line send KV with NIXL, from memory to memory over sockets,
behind the proxy.

Prompts and engines are those of the first line's `tests/behaviour/test_nixl.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

from examples import proxy
from examples.client import Completion, generate
from harness import disaggregated
from harness.server import Server
from tests.behaviour.conftest import assert_rows
from tests.behaviour.test_disaggregated_engines import Pair
from tests.behaviour.test_nixl import GREEDY, LENGTHS, PROMPTS

pytestmark = pytest.mark.slow

LINE = Path(__file__).parent.name
# The rest of a block that was received in part, and the next one.
MAX_TOKENS = 40


@pytest.fixture(scope="module")
def pair(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    folder = tmp_path_factory.mktemp("nixl")
    servers = []
    for role in (disaggregated.PREFILL, disaggregated.DECODE):
        arguments, environment = disaggregated.nixl(role)
        arguments.append("--enforce-eager")
        log = folder / f"{role}.log"
        servers.append(Server(model, log, arguments, environment, line=LINE))
    with ExitStack() as stack:
        with ThreadPoolExecutor() as pool:  # they take long to start
            started = [pool.submit(stack.enter_context, server) for server in servers]
        prefill, decode = (future.result() for future in started)
        yield Pair(prefill, decode, stack.enter_context(proxy.running(prefill.url, decode.url)))


def complete(url: str, prompt: list[int]) -> Completion:
    (completion,) = generate(url, prompt, {**GREEDY, "max_tokens": MAX_TOKENS})
    assert completion.start == 0
    return completion


def test_joined_rows_are_true_and_received_blocks_are_computed_for_others(
    pair: Pair, model: Path
) -> None:
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        joined = list(pool.map(lambda prompt: complete(pair.url, prompt), PROMPTS))
    assert pair.decode.metric(disaggregated.RECEIVED) == sum(LENGTHS)
    assert pair.decode.metric("vllm:nixl_bytes_transferred_sum")
    alone = [complete(pair.decode.url, prompt) for prompt in PROMPTS]
    for prompt, *completions in zip(PROMPTS, joined, alone, strict=True):
        for completion in completions:
            assert_rows(model, [*prompt, *completion.token_ids], completion.rows)
