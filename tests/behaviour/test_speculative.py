# SPDX-License-Identifier: Apache-2.0
"""Speculative decoding: rejected drafts leave no rows, and draft layers never appear.

N-gram drafts come from the prompt. MTP drafts come from a layer of the model that routes too, with
the number after the target's last. EAGLE drafts come from another model, without a router.
"""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, LlamaConfig
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeDecoderLayer
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from tests.behaviour.conftest import (
    BLOCK,
    CHUNK,
    ENGINES,
    ask,
    assert_all_true,
    random_prompt,
    running,
    scheduler_of,
)

if TYPE_CHECKING:
    from vllm import LLM
    from vllm.outputs import RequestOutput

pytestmark = ENGINES

LAYERS = 4
# Makes residual streams depend mostly on the token, so that drafts from the token alone are often
# right and often wrong.
EMBEDDING_SCALE = 24.0


@dataclass(frozen=True)
class Speculating:
    model: Path
    llm: LLM

    def ask(self, *prompts: list[int], **sampling: Any) -> list[RequestOutput]:
        return ask(self.llm, *prompts, **{"max_tokens": 40, **sampling})

    def counts(self) -> tuple[int, int]:
        """Draft tokens so far, and those of them that were accepted."""
        values = {m.name: m.value for m in self.llm.get_metrics() if hasattr(m, "value")}
        return (
            values["vllm:spec_decode_num_draft_tokens"],
            values["vllm:spec_decode_num_accepted_tokens"],
        )


def repetitive_prompt(seed: int, length: int) -> list[int]:
    """A prompt that repeats a few tokens."""
    return list(itertools.islice(itertools.cycle(random_prompt(seed, 9)), length))


def copy_with_large_embedding(target: Path, path: Path) -> dict[str, torch.Tensor]:
    """Copy a checkpoint. Returns its weights, with a larger embedding, for the copy."""
    shutil.copytree(target, path)
    weights = load_file(target / "model.safetensors")
    weights["model.embed_tokens.weight"] *= EMBEDDING_SCALE
    return weights


def split_experts(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Weights by expert, as checkpoints have them. `transformers` 5 keeps all weights of a layer in
    one tensor, of shape (experts, outputs, inputs)."""
    prefix, found, kind = name.partition(".experts.")
    parts = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}.get(kind)
    if not (found and parts):
        yield name, tensor
        return
    for expert, weights in enumerate(tensor):
        for part, weight in zip(parts, weights.chunk(len(parts)), strict=True):
            yield f"{prefix}.experts.{expert}.{part}.weight", weight


def make_draft_layer(target: Path, path: Path) -> Path:
    """A copy of a GLM-4-MoE checkpoint with an MTP layer, which drafts what the target
    would say if its layers did little."""
    weights = copy_with_large_embedding(target, path)
    config = AutoConfig.from_pretrained(target)
    size = config.hidden_size
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        draft = {
            name: tensor.normal_(std=0.02)
            for name, tensor in Glm4MoeDecoderLayer(config, LAYERS).state_dict().items()
        }
    draft = dict(item for name, tensor in draft.items() for item in split_experts(name, tensor))
    for name in ("input_layernorm.weight", "post_attention_layernorm.weight"):
        draft[name] = torch.ones(size)
    draft |= {
        "enorm.weight": torch.ones(size),
        "hnorm.weight": torch.ones(size),
        # What it sees is the token; the target's hidden state takes part a little.
        "eh_proj.weight": torch.cat([torch.eye(size), 0.1 * torch.eye(size)], dim=1),
        "shared_head.norm.weight": torch.ones(size),
        "shared_head.head.weight": weights["lm_head.weight"].clone(),
        "embed_tokens.weight": weights["model.embed_tokens.weight"].clone(),
    }
    weights |= {f"model.layers.{LAYERS}.{name}": t.contiguous() for name, t in draft.items()}
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    settings = json.loads((path / "config.json").read_text())
    settings["num_nextn_predict_layers"] = 1
    (path / "config.json").write_text(json.dumps(settings))
    return path


def make_eagle(target: Path, directory: Path) -> tuple[Path, Path]:
    """A copy of a checkpoint, and an EAGLE model of one Llama layer, which drafts what the copy
    would say if its layers did little."""
    model, eagle = directory / "model", directory / "eagle"
    weights = copy_with_large_embedding(target, model)
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})

    settings = json.loads((target / "config.json").read_text())
    size, vocabulary = settings["hidden_size"], settings["vocab_size"]
    config = LlamaConfig(
        architectures=["LlamaForCausalLM"],
        hidden_size=size,
        intermediate_size=size,
        num_attention_heads=2,
        num_hidden_layers=1,
        vocab_size=vocabulary,
        max_position_embeddings=settings["max_position_embeddings"],
        attn_implementation="eager",
    )
    config.save_pretrained(eagle)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        layer = {
            f"layers.0.{name}": tensor.normal_(std=0.02)
            for name, tensor in LlamaDecoderLayer(config, 0).state_dict().items()
            # The first layer of an EAGLE model has none.
            if name != "input_layernorm.weight"
        }
    layer["layers.0.post_attention_layernorm.weight"] = torch.ones(size)
    # What it sees is the token; the target's hidden state takes part a little.
    layer["fc.weight"] = torch.cat([torch.eye(size), 0.1 * torch.eye(size)], dim=1)
    save_file({k: t.contiguous() for k, t in layer.items()}, eagle / "model.safetensors")
    return model, eagle


SPECULATIVE: dict[str, dict[str, Any]] = {
    "ngram": {
        "method": "ngram",
        "num_speculative_tokens": 4,
        "prompt_lookup_max": 3,
        "prompt_lookup_min": 1,
    },
    "mtp": {"method": "mtp", "num_speculative_tokens": 3},
    "eagle": {"method": "eagle", "num_speculative_tokens": 3},
}


@pytest.fixture(scope="module", params=SPECULATIVE)
def speculating(
    request: pytest.FixtureRequest,
    checkpoint: Callable[..., Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Speculating]:
    config = SPECULATIVE[request.param]
    model = checkpoint("glm4_moe") if request.param == "mtp" else checkpoint(mlp_only_layers=[1])
    if request.param == "mtp":
        model = make_draft_layer(model, tmp_path_factory.mktemp("mtp") / "model")
    elif request.param == "eagle":
        model, draft = make_eagle(model, tmp_path_factory.mktemp("eagle"))
        config = {**config, "model": str(draft)}
    with running(model, speculative_config=config, disable_log_stats=False) as llm:
        yield Speculating(model, llm)


@pytest.fixture
def dropped(speculating: Speculating, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many accepted tokens after its end each step of a request drops."""
    scheduler = scheduler_of(speculating.llm)
    update = scheduler._update_request_with_output
    dropped: list[int] = []

    def counting(request: Any, new_token_ids: list[int], **more: Any) -> Any:
        before = len(new_token_ids)
        kept, stopped = update(request, new_token_ids, **more)
        dropped.append(before - len(kept))
        return kept, stopped

    monkeypatch.setattr(scheduler, "_update_request_with_output", counting)
    return dropped


def test_rows_are_true_where_drafts_were_accepted_and_rejected(speculating: Speculating) -> None:
    drafted, accepted = speculating.counts()
    outputs = speculating.ask(*(repetitive_prompt(i, n) for i, n in enumerate((30, 2 * CHUNK))))
    now_drafted, now_accepted = speculating.counts()
    assert now_accepted > accepted
    assert now_drafted - drafted > now_accepted - accepted
    assert_all_true(speculating.model, outputs)


def test_rows_end_with_a_stop_token_amid_accepted_drafts(
    speculating: Speculating, dropped: list[int]
) -> None:
    prompts = [repetitive_prompt(30 + i, 30) for i in range(8)]
    conversations = [
        [*o.prompt_token_ids, *o.outputs[0].token_ids] for o in speculating.ask(*prompts)
    ]
    for conversation, whole in zip(conversations, speculating.ask(*conversations), strict=True):
        for stop in list(dict.fromkeys(whole.outputs[0].token_ids))[:4]:
            (output,) = speculating.ask(conversation, stop_token_ids=[stop])
            assert output.outputs[0].finish_reason == "stop"
            assert_all_true(speculating.model, [output])
    assert any(dropped)


def test_rows_end_with_the_last_token_allowed(speculating: Speculating, dropped: list[int]) -> None:
    prompts = [repetitive_prompt(30 + i, 33) for i in range(8)]
    for max_tokens in (1, 2, 3, 5, 17, 18, 20):
        outputs = speculating.ask(*prompts, max_tokens=max_tokens)
        assert {len(o.outputs[0].token_ids) for o in outputs} == {max_tokens}
        assert_all_true(speculating.model, outputs)
    assert any(dropped)


def test_rows_behind_a_prefix_made_with_drafts_are_true(speculating: Speculating) -> None:
    """Only accepted tokens and their rows are cached."""
    prompt = repetitive_prompt(50, BLOCK + 5)
    (first,) = speculating.ask(prompt, max_tokens=3 * BLOCK)
    conversation = [*prompt, *first.outputs[0].token_ids, *random_prompt(51, 5)]
    (second,) = speculating.ask(conversation)
    assert second.num_cached_tokens > 2 * BLOCK
    assert_all_true(speculating.model, [first, second])


def test_rows_of_sampled_tokens_are_those_of_each_choice(speculating: Speculating) -> None:
    prompts = [repetitive_prompt(60 + i, 50) for i in range(4)]
    outputs = speculating.ask(*prompts, n=3, temperature=1.0, seed=2)
    assert len({tuple(c.token_ids) for c in outputs[0].outputs}) > 1
    assert_all_true(speculating.model, outputs)
