# SPDX-License-Identifier: Apache-2.0
"""One engine, with and without the prefix cache: every feature that adds, drops or repeats tokens.
Every row is the oracle's."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from tests.behaviour.conftest import (
    BLOCK,
    CHUNK,
    ENGINES,
    as_prompts,
    ask,
    assert_all_true,
    assert_rows,
    caches,
    make_params,
    random_prompt,
    running,
)

if TYPE_CHECKING:
    from vllm import LLM

pytestmark = ENGINES


@pytest.fixture(scope="module", params=[True, False], ids=["caching", "no_caching"])
def llm(request: pytest.FixtureRequest, model: Path) -> Iterator[LLM]:
    with running(model, enable_prefix_caching=request.param) as llm:
        yield llm


@pytest.mark.parametrize("max_tokens", [1, 6])
@pytest.mark.parametrize("length", [1, BLOCK, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 5])
def test_prompt_of_any_length_has_true_rows(
    llm: LLM, model: Path, length: int, max_tokens: int
) -> None:
    prompt = random_prompt(length, length)
    # The second time from the cache, if there is one.
    for _ in range(2):
        assert_all_true(model, ask(llm, prompt, max_tokens=max_tokens))


def test_rows_are_true_where_chunks_and_single_tokens_share_steps(llm: LLM, model: Path) -> None:
    prompts = [random_prompt(10 + i, n) for i, n in enumerate((7, 200, 3, 150, 64, 65, 31, 9, 90))]
    assert_all_true(model, ask(llm, *prompts, max_tokens=20))


def test_rows_of_groups_are_true(llm: LLM, model: Path) -> None:
    """Members of a group hit each other's blocks in the step that schedules them."""
    prompts = [random_prompt(20 + length, length) for length in (20, BLOCK, 70, 3 * CHUNK)]
    outputs = ask(llm, *prompts, n=6, temperature=1.0, seed=1, max_tokens=BLOCK)
    for output in outputs:
        assert len({tuple(c.token_ids) for c in output.outputs}) > 1
    assert_all_true(model, outputs)


def test_rows_of_every_turn_are_true(llm: LLM, model: Path) -> None:
    conversation = random_prompt(40, BLOCK + 9)
    for turn in range(4):
        (output,) = ask(llm, conversation, max_tokens=BLOCK + 3)
        assert_all_true(model, [output])
        if turn:
            assert bool(output.num_cached_tokens) == caches(llm)
        conversation += [*output.outputs[0].token_ids, *random_prompt(41 + turn, 6)]


def test_rows_of_structured_output_are_true(llm: LLM, model: Path) -> None:
    from vllm.sampling_params import StructuredOutputsParams

    schema = {
        "type": "object",
        "properties": {"a": {"type": "boolean"}},
        "required": ["a"],
        "additionalProperties": False,
    }
    (output,) = ask(
        llm,
        random_prompt(70, CHUNK + 20),
        structured_outputs=StructuredOutputsParams(json=schema),
        ignore_eos=False,
        temperature=1.0,
        seed=3,
        max_tokens=100,
    )
    assert set(json.loads(output.outputs[0].text)) == {"a"}
    assert_all_true(model, [output])


def test_rows_beside_prompt_logprobs_are_true(llm: LLM, model: Path) -> None:
    prompt = random_prompt(80, 2 * CHUNK + 30)
    outputs = [ask(llm, prompt, prompt_logprobs=2, logprobs=2)[0] for _ in range(2)]
    assert len(outputs[1].prompt_logprobs) == len(prompt)
    assert_all_true(model, outputs)


def test_rows_end_with_a_stop_string(llm: LLM, model: Path) -> None:
    prompt = random_prompt(90, BLOCK + 2)
    text = ask(llm, prompt, max_tokens=20)[0].outputs[0].text
    for include in (False, True):
        (output,) = ask(
            llm, prompt, max_tokens=20, stop=[text[6:9]], include_stop_str_in_output=include
        )
        assert output.outputs[0].stop_reason == text[6:9]
        assert len(output.outputs[0].token_ids) < 20
        assert_all_true(model, [output])


def test_rows_end_with_the_end_of_text_unless_it_is_ignored(llm: LLM, model: Path) -> None:
    prompt = random_prompt(92, 40)
    bias = {"logit_bias": {0: 100.0}}
    (ended,) = ask(llm, prompt, ignore_eos=False, **bias)
    assert list(ended.outputs[0].token_ids) == [0]
    (ignored,) = ask(llm, prompt, ignore_eos=True, **bias)
    assert list(ignored.outputs[0].token_ids) == [0] * 6
    assert_all_true(model, [ended, ignored])


def collect(llm: LLM, prompts: dict[str, list[int]], steps: int, **sampling: Any) -> Any:
    """Run requests for some steps. Returns their tokens and rows so far."""
    from vllm.sampling_params import RequestOutputKind

    kept: dict[str, tuple[list[int], list[np.ndarray]]] = {r: ([], []) for r in prompts}
    for request_id, prompt in prompts.items():
        given = make_params(output_kind=RequestOutputKind.DELTA, **sampling)
        llm.llm_engine.add_request(request_id, as_prompts(prompt)[0], given)
    for _ in range(steps):
        keep(llm, kept)
    return kept


def keep(llm: LLM, kept: dict[str, tuple[list[int], list[np.ndarray]]]) -> None:
    for output in llm.llm_engine.step():
        tokens, rows = kept[output.request_id]
        (completion,) = output.outputs
        tokens += completion.token_ids
        if completion.routed_experts is not None:
            assert completion.routed_experts_start == sum(map(len, rows))
            rows.append(completion.routed_experts)


@pytest.mark.parametrize("steps", [1, 2, 5])
def test_rows_are_true_around_a_reset_amid_requests(llm: LLM, model: Path, steps: int) -> None:
    """Requests start again from their first token; returned rows are not sent again."""
    prompts = {
        f"{name}-{steps}": random_prompt(180 + steps * 3 + i, n)
        for i, (name, n) in enumerate({"long": CHUNK + 30, "short": 20}.items())
    }
    kept = collect(llm, prompts, steps, max_tokens=20)
    assert llm.reset_prefix_cache(reset_running_requests=True)
    while llm.llm_engine.has_unfinished_requests():
        keep(llm, kept)
    for name, prompt in prompts.items():
        tokens, rows = kept[name]
        assert len(tokens) == 20
        assert_rows(model, [*prompt, *tokens], np.concatenate(rows))


def test_rows_of_adapters_are_those_of_merged_weights(model: Path, tmp_path: Path) -> None:
    """Only attention has adapters: the CPU's MoE kernel takes none."""
    from vllm.lora.request import LoRARequest

    names = ["q_proj", "v_proj", "o_proj"]
    merged: list[tuple[Path, LoRARequest | None]] = [(model, None)]
    for seed in (1, 2):
        folder = tmp_path / str(seed)
        weights = make_adapter(model, folder, names, seed)
        merged.append((weights, LoRARequest(folder.name, seed, str(folder / "adapter"))))
    prompt = random_prompt(230, 3 * BLOCK + 4)
    options = {"enable_lora": True, "max_lora_rank": 8, "max_loras": 2}
    with running(model, lora_target_modules=names, **options) as llm:
        for turn in range(2):
            for weights, adapter in merged:
                (output,) = ask(llm, prompt, lora=adapter)
                assert output.num_cached_tokens == turn * 3 * BLOCK
                assert_all_true(weights, [output])
        # Beside adapters, vLLM's CPU kernels apply one to requests that have none as well.
        adapted = merged[1:]
        outputs = ask(llm, prompt, prompt, lora=[request for _, request in adapted])
    for (weights, _), output in zip(adapted, outputs, strict=True):
        assert_all_true(weights, [output])


def make_adapter(model: Path, folder: Path, names: list[str], seed: int) -> Path:
    """A random LoRA adapter, and the checkpoint that it makes of the model."""
    import torch
    from safetensors.torch import load_file, save_file

    adapter, merged = folder / "adapter", folder / "merged"
    shutil.copytree(model, merged)
    adapter.mkdir()
    generator = torch.Generator().manual_seed(seed)
    weights, factors = load_file(model / "model.safetensors"), {}
    for key, weight in weights.items():
        if key.split(".")[-2] not in names:
            continue
        a = 0.3 * torch.randn(8, weight.shape[1], generator=generator)
        b = 0.3 * torch.randn(weight.shape[0], 8, generator=generator)
        stem = f"base_model.model.{key.removesuffix('.weight')}"
        factors |= {f"{stem}.lora_A.weight": a, f"{stem}.lora_B.weight": b}
        weights[key] = weight + b @ a
    assert factors
    save_file(factors, adapter / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 8, "lora_alpha": 8, "target_modules": names, "bias": "none"}
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    save_file(weights, merged / "model.safetensors", metadata={"format": "pt"})
    return merged
