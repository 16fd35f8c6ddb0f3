# SPDX-License-Identifier: Apache-2.0
"""Weights change while an engine with offloaded KV sleeps. More is in
`tests/behaviour/test_weights.py`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.behaviour.conftest import BLOCK, CHUNK, ask, assert_all_true, random_prompt, running
from tests.behaviour.test_weights import load
from tests.v0_33_0.host_offload import LOADED, offloading

pytestmark = pytest.mark.slow
PROMPT = random_prompt(930, CHUNK + 2 * BLOCK + 3)


@pytest.fixture(scope="module")
def other(checkpoint: Callable[..., Path]) -> Path:
    """Other weights of the same model."""
    return checkpoint(seed=1, mlp_only_layers=[1])


def test_prompts_after_a_sleep_have_rows_of_the_new_weights_alone(model: Path, other: Path) -> None:
    """A sleep forgets the offloaded KV too. The CPU's worker sleeps without freeing its memory."""
    LOADED.clear()
    silent = {"return_routed_experts": False}
    with running(model, **offloading()) as llm:
        assert_all_true(model, ask(llm, PROMPT))
        llm.reset_prefix_cache()
        ask(llm, PROMPT, **silent)
        assert len(LOADED) == 1
        assert LOADED[0] == len(PROMPT) // BLOCK
        llm.sleep(level=1)
        load(llm, other)
        llm.wake_up()
        first, again = (ask(llm, PROMPT)[0] for _ in range(2))
        assert (first.num_cached_tokens, again.num_cached_tokens) == (0, BLOCK * LOADED[0])
        ask(llm, PROMPT, **silent)
    assert len(LOADED) == 1
    assert_all_true(other, [first, again])
