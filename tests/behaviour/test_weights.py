# SPDX-License-Identifier: Apache-2.0
"""Weights change: between requests, and under running requests (mode `keep`).

A row is the choice of the weights that computed its token. They computed it over the KV that was
there, which earlier weights may have computed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from transformers import AutoModelForCausalLM

from harness import oracle
from tests.behaviour.conftest import (
    BLOCK,
    CHUNK,
    ENGINES,
    ask,
    assert_all_true,
    make_params,
    random_prompt,
    running,
    scheduler_of,
)

if TYPE_CHECKING:
    from vllm import LLM
    from vllm.outputs import RequestOutput

pytestmark = ENGINES

# The last one needs several steps for its prompt.
PROMPTS = [random_prompt(900, 40), random_prompt(901, 70), random_prompt(902, 3 * CHUNK)]


@pytest.fixture(scope="module")
def engine(model: Path) -> Iterator[LLM]:
    # With so few blocks, requests get blocks that others had with other weights.
    with running(model, num_gpu_blocks_override=24) as llm:
        yield llm


@pytest.fixture
def llm(engine: LLM, model: Path) -> LLM:
    """The engine with the weights of `model`, and nothing cached."""
    load(engine, model)
    engine.reset_prefix_cache()
    return engine


@pytest.fixture(scope="module")
def other(checkpoint: Callable[..., Path]) -> Path:
    """Other weights of the same model."""
    return checkpoint(seed=1, mlp_only_layers=[1])


def load(llm: LLM, weights: Path) -> None:
    llm.collective_rpc("reload_weights", kwargs={"weights_path": str(weights)})


@contextmanager
def paused(llm: LLM, clear_cache: bool) -> Iterator[None]:
    """What `/pause?mode=keep` and `/resume` do."""
    core: Any = llm.llm_engine.engine_core
    core.engine_core.pause_scheduler(mode="keep", clear_cache=clear_cache)
    yield
    core.engine_core.resume_scheduler()


def begin(llm: LLM, max_tokens: int = 24) -> list[int]:
    """Start a request for each of `PROMPTS`. Run them until the last one has computed a part of
    its prompt, and the others generate. Returns how many tokens each has computed."""
    for number, prompt in enumerate(PROMPTS):
        params = make_params(max_tokens=max_tokens, logprobs=0)
        llm.llm_engine.add_request(str(number), {"prompt_token_ids": prompt}, params)
    requests = scheduler_of(llm).running
    while len(requests) < len(PROMPTS) or any(not r.num_output_tokens for r in requests[:-1]):
        assert not any(output.finished for output in llm.llm_engine.step())
    computed = [request.num_computed_tokens for request in requests]
    assert 0 < computed[-1] < len(PROMPTS[-1])
    return computed


def finish(llm: LLM) -> list[RequestOutput]:
    """Run all requests to their end. Returns them in the order of `PROMPTS`."""
    done = {}
    while llm.llm_engine.has_unfinished_requests():
        done.update((o.request_id, o) for o in llm.llm_engine.step() if o.finished)
    return [done[str(number)] for number in range(len(PROMPTS))]


def sequence_of(output: RequestOutput) -> tuple[list[int], npt.NDArray[Any]]:
    """All tokens, and the rows of all but the last one."""
    completion = output.outputs[0]
    tokens = [*(output.prompt_token_ids or ()), *completion.token_ids]
    assert completion.routed_experts is not None
    assert completion.routed_experts_start == 0
    assert len(completion.routed_experts) == len(tokens) - 1
    return tokens, completion.routed_experts


def assert_agree(rows: npt.NDArray[Any], routes: oracle.Routes, start: int = 0) -> None:
    comparison = oracle.compare(rows, routes, start)
    assert comparison.agree == comparison.rows, comparison.disagreements[0]


def assert_in_turns(output: RequestOutput, old: Path, num_old: int, new: Path) -> None:
    """The old weights computed the first `num_old` tokens, and the new ones continued their KV.

    Neither one of the two alone gives these rows.
    """
    tokens, rows = sequence_of(output)
    assert 0 < num_old < len(tokens) - 1
    assert_agree(rows, oracle.route_in_turns((old, tokens[:num_old]), (new, tokens[num_old:])))
    for alone in (old, new):
        comparison = oracle.compare(rows, oracle.route(alone, tokens))
        assert comparison.agree < comparison.rows


def test_same_weights_that_are_loaded_again_give_true_rows(llm: LLM, model: Path) -> None:
    load(llm, model)
    load(llm, model)
    assert_all_true(model, ask(llm, *PROMPTS))


def test_requests_after_a_change_of_weights_get_rows_of_the_new_ones(
    llm: LLM, model: Path, other: Path
) -> None:
    assert_all_true(model, ask(llm, *PROMPTS))
    load(llm, other)
    llm.reset_prefix_cache()
    assert_all_true(other, ask(llm, *PROMPTS))
    load(llm, model)
    llm.reset_prefix_cache()
    assert_all_true(model, ask(llm, *PROMPTS))


def test_running_requests_continue_with_new_weights_over_the_old_kv(
    llm: LLM, model: Path, other: Path
) -> None:
    computed = begin(llm)
    with paused(llm, clear_cache=False):
        load(llm, other)
    for output, num_old in zip(finish(llm), computed, strict=True):
        assert_in_turns(output, model, num_old, other)


def test_prefix_of_the_old_weights_has_their_rows(llm: LLM, model: Path, other: Path) -> None:
    begin(llm)
    with paused(llm, clear_cache=False):
        load(llm, other)
    finish(llm)
    (again,) = ask(llm, PROMPTS[1])
    assert again.num_cached_tokens == len(PROMPTS[1]) // BLOCK * BLOCK
    assert_in_turns(again, model, again.num_cached_tokens, other)


def test_prefix_of_the_old_weights_is_not_hit_with_the_salt_of_the_new_ones(
    llm: LLM, model: Path, other: Path
) -> None:
    """SkyRL gives each version of the weights a `cache_salt`, and keeps the cache."""
    old, new = ({"prompt_token_ids": PROMPTS[1], "cache_salt": salt} for salt in "01")
    assert_all_true(model, ask(llm, old))
    with paused(llm, clear_cache=False):
        load(llm, other)
    first, again = (ask(llm, new)[0] for _ in range(2))
    assert first.num_cached_tokens == 0
    assert again.num_cached_tokens == len(PROMPTS[1]) // BLOCK * BLOCK
    assert_all_true(other, [first, again])
    assert_in_turns(ask(llm, old)[0], model, again.num_cached_tokens, other)


def test_prefix_may_have_rows_of_both_weights(llm: LLM, model: Path, other: Path) -> None:
    """The request that computed it ran while the weights changed."""
    computed = begin(llm)
    with paused(llm, clear_cache=False):
        load(llm, other)
    tokens, _ = sequence_of(finish(llm)[-1])
    (longer,) = ask(llm, tokens)
    assert longer.num_cached_tokens > computed[-1]
    assert_in_turns(longer, model, computed[-1], other)


def test_requests_after_a_reset_get_rows_of_the_new_weights_alone(
    llm: LLM, model: Path, other: Path
) -> None:
    begin(llm)
    with paused(llm, clear_cache=False):
        load(llm, other)
    finish(llm)
    llm.reset_prefix_cache()
    assert_all_true(other, ask(llm, *PROMPTS))


def test_running_requests_whose_kv_is_cleared_keep_the_rows_of_their_tokens(
    llm: LLM, model: Path, other: Path
) -> None:
    """New weights compute the KV again, but the old ones sampled the tokens. A request without a
    token has no rows yet: all of its rows are of the new weights."""
    *computed, _ = begin(llm)
    with paused(llm, clear_cache=True):
        load(llm, other)
    for output, num_old in zip(finish(llm), [*computed, 0], strict=True):
        tokens, rows = sequence_of(output)
        assert_agree(rows[:num_old], oracle.route(model, tokens))
        assert_agree(rows[num_old:], oracle.route(other, tokens), num_old)


def test_request_that_is_preempted_later_keeps_the_rows_of_its_tokens(
    model: Path, other: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """New weights compute its whole KV again, since nothing is cached, and then its next tokens."""
    preempted: dict[str, int] = {}
    # All blocks are taken until a request needs one more.
    few = {"num_gpu_blocks_override": 13, "max_model_len": 320}
    with running(model, enable_prefix_caching=False, **few) as llm:
        scheduler = scheduler_of(llm)
        preempt = scheduler._preempt_request

        def note(request: Any, *more: Any, **named: Any) -> Any:
            preempted[request.request_id.partition("-")[0]] = request.num_tokens - 1
            return preempt(request, *more, **named)

        monkeypatch.setattr(scheduler, "_preempt_request", note)
        *_, num_old = begin(llm, max_tokens=40)
        with paused(llm, clear_cache=False):
            load(llm, other)
        output = finish(llm)[-1]
    (num_kept,) = preempted.values()
    tokens, rows = sequence_of(output)
    assert len(PROMPTS[-1]) < num_kept < len(rows)
    in_turns = oracle.route_in_turns((model, tokens[:num_old]), (other, tokens[num_old:]))
    assert_agree(rows[:num_kept], in_turns)
    assert_agree(rows[num_kept:], oracle.route(other, tokens), num_kept)
    assert oracle.compare(rows[num_kept:], in_turns, num_kept).disagreements


def log_probs(weights: Path, tokens: list[int]) -> npt.NDArray[Any]:
    """The log-probability of each token but the first, by `transformers`."""
    model = AutoModelForCausalLM.from_pretrained(weights, dtype=torch.float32)
    with torch.inference_mode():
        scores = model(torch.tensor([tokens])).logits[0].log_softmax(-1)
    found: npt.NDArray[Any] = scores[range(len(tokens) - 1), tokens[1:]].numpy()
    return found


def test_rows_and_log_probs_of_a_token_are_of_the_pass_that_sampled_it(
    llm: LLM, model: Path, other: Path
) -> None:
    *computed, _ = begin(llm)
    with paused(llm, clear_cache=True):
        load(llm, other)
    for output, num_old in zip(finish(llm), [*computed, 0], strict=True):
        tokens, rows = sequence_of(output)
        old, new = log_probs(model, tokens), log_probs(other, tokens)
        expected = np.concatenate([old[:num_old], new[num_old:]])
        assert len(rows) == len(expected)
        num_prompt = len(output.prompt_token_ids or ())
        sampled = zip(output.outputs[0].logprobs or (), tokens[num_prompt:], strict=True)
        given = [of_token[token].logprob for of_token, token in sampled]
        np.testing.assert_allclose(given, expected[num_prompt - 1 :], atol=1e-4)
        if num_old:
            assert np.abs(given - new[num_prompt - 1 :]).max() > 0.01
