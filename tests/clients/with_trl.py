# SPDX-License-Identifier: Apache-2.0
"""TRL: the passes of its `GRPOTrainer`, with the recipe, on a small model of as many layers and
experts as the recorded one."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from driving import Turn
from tokenizers import Tokenizer, models
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedTokenizerFast, Qwen3MoeConfig, Qwen3MoeForCausalLM
from trl import GRPOConfig

from examples.client import Completion
from examples.clients.trl_replay import ReplayTrainer
from examples.clients.turns import join_turns

# Of every recorded model, or more.
NUM_EXPERTS, VOCABULARY = 300, 1024
# Padding on the left and on the right.
LEFT, RIGHT = 3, 5


class Selections(TorchFunctionMode):
    """Keeps what each MoE block of Qwen3-MoE gives to its experts."""

    def __init__(self) -> None:
        super().__init__()
        self.ids: list[torch.Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.nn.functional.one_hot:
            self.ids.append(args[0])
        return func(*args, **(kwargs or {}))


def make_trainer(completion: Completion, folder: str) -> ReplayTrainer:
    layers, most = completion.rows.shape[1:]
    sizes = {"hidden_size": 8, "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 8}
    config = Qwen3MoeConfig(
        vocab_size=VOCABULARY,
        moe_intermediate_size=4,
        intermediate_size=4,
        num_hidden_layers=layers,
        num_experts=NUM_EXPERTS,
        num_experts_per_tok=most,
        mlp_only_layers=[n for n in range(layers) if n not in completion.moe_layers],
        **sizes,
    )
    model = Qwen3MoeForCausalLM(config)
    for layer, rows in completion.by_layer().items():
        model.model.layers[layer].mlp.top_k = rows.shape[1]
    tokenizer = Tokenizer(models.WordLevel({"<pad>": 0, "<end>": 1}, unk_token="<end>"))
    return ReplayTrainer(
        model,
        lambda completion_ids, **_: [0.0] * len(completion_ids),
        args=GRPOConfig(folder, use_cpu=True, bf16=False, report_to=[]),
        train_dataset=Dataset.from_dict({"prompt": [""]}),
        processing_class=PreTrainedTokenizerFast(
            tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<end>"
        ),
        url="",
        weights=folder,
    )


def replay(turns: list[Turn]) -> list[tuple[list[int], Any]]:
    """The choices of one turn, or several turns in one."""
    answered = [turn.completions() for turn in turns if not turn.aborted_at_once]
    if len(answered) > 1:
        answered = [[join_turns([turn[0] for turn in answered])]]
    with tempfile.TemporaryDirectory() as folder:
        return replay_batch(answered[0], folder)


def replay_batch(completions: Sequence[Completion], folder: str) -> list[tuple[list[int], Any]]:
    trainer = make_trainer(completions[0], folder)
    trainer.completions = list(completions)
    sequences = [[*c.prompt, *c.token_ids] for c in completions]
    width = LEFT + max(map(len, sequences)) + RIGHT
    ids, mask = (torch.zeros(len(sequences), width, dtype=torch.int64) for _ in range(2))
    for i, sequence in enumerate(sequences):
        ids[i, LEFT : LEFT + len(sequence)] = torch.tensor(sequence)
        mask[i, LEFT : LEFT + len(sequence)] = 1
    with torch.no_grad(), Selections() as selected:
        trainer._get_per_token_logps_and_entropies(trainer.model, ids, mask, 2)
    layers, most = completions[0].rows.shape[1:]
    routes = np.zeros((*ids.shape, layers, most), dtype=np.int64)
    for layer, taken in zip(completions[0].moe_layers, selected.ids, strict=True):
        padded = np.pad(taken.numpy(), ((0, 0), (0, most - taken.shape[1])), mode="edge")
        routes[:, :, layer] = padded.reshape(*ids.shape, most)
    return [(s, route[LEFT : LEFT + len(s)]) for s, route in zip(sequences, routes, strict=True)]
