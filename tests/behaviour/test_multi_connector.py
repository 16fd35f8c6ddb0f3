# SPDX-License-Identifier: Apache-2.0
"""A prefill and a decode engine send KV with NIXL and share it through files too (MultiConnector):
the prompt's rows travel in the parameters that NIXL returns."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from harness import disaggregated
from harness.disaggregated import Pair
from tests.behaviour.test_nixl import CASES, ask_generate

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def pair(model: Path, line: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    folder = tmp_path_factory.mktemp("multi")
    with disaggregated.running(model, folder, disaggregated.both(folder / "kv"), line) as pair:
        yield pair


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_answer_of_two_connectors_has_every_row_from_the_asked_one_on(
    pair: Pair, model: Path, stream: bool
) -> None:
    before = pair.decode.metric(disaggregated.RECEIVED) or 0
    with ThreadPoolExecutor(len(CASES)) as pool:
        list(pool.map(lambda case: ask_generate(pair, model, case, 10 * stream, stream), CASES))
    assert (pair.decode.metric(disaggregated.RECEIVED) or 0) > before
    assert pair.decode.metric("vllm:nixl_bytes_transferred_sum")
