# SPDX-License-Identifier: Apache-2.0
"""Weights change in an engine with offloaded KV. More is in `tests/behaviour/test_weights.py`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.behaviour.conftest import BLOCK, CHUNK, ask, assert_all_true, random_prompt, running
from tests.behaviour.test_weights import assert_in_turns, load
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
        ask(llm, PROMPT, **silent)
        first, again = (ask(llm, PROMPT)[0] for _ in range(2))
    assert len(LOADED) == 1
    assert (first.num_cached_tokens, again.num_cached_tokens) == (0, BLOCK * LOADED[0])
    assert_all_true(other, [first, again])


def test_offloaded_prefix_of_the_old_weights_has_their_rows(model: Path, other: Path) -> None:
    """Its blocks are overwritten, and loaded again after the weights have changed."""
    LOADED.clear()
    few = {"num_gpu_blocks_override": 12, "max_model_len": 256}
    with running(model, **offloading(), **few) as llm:
        ask(llm, PROMPT)
        ask(llm, *(random_prompt(931 + i, 200) for i in range(2)))
        assert not LOADED
        load(llm, other)
        (loaded,) = ask(llm, [*PROMPT, 7, 8])
    assert len(LOADED) == 1
    assert loaded.num_cached_tokens == BLOCK * LOADED[0] == len(PROMPT) // BLOCK * BLOCK
    assert_in_turns(loaded, model, loaded.num_cached_tokens, other)
