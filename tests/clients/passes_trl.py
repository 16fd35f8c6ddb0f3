# SPDX-License-Identifier: Apache-2.0
"""TRL's trainer on random routes, in its environment: `passes_trl.py CHECKPOINT OUT [CASE...]`.

Instead of a server, the model itself gives the log-probs of random tokens on random routes, each
sequence alone and without padding. OUT gets JSON: by case, what the trainer found.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import transformers
from datasets import Dataset
from trl import GRPOConfig

from examples.client import Completion
from examples.clients import trl_replay
from examples.clients.trl_replay import ReplayTrainer
from examples.replay import replay

CASES: dict[str, dict[str, Any]] = {
    "replay": {},
    "own": {"replays": False},
    "checkpointed": {"gradient_checkpointing": True},
    "cut off": {"mask_truncated_completions": True},
    "padded to multiples": {"pad_to_multiple_of": 32},
    "two iterations": {"num_iterations": 2, "max_steps": 2},
    "rows missing": {"missing": 1},
}
PROMPTS = [" ".join(["word"] * length) for length in (5, 17)]
LENGTHS = (9, 14, 6)  # of completions, in turns


def load(checkpoint: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)


class Stub:
    """Stands in for the server, and for `examples.client.generate`."""

    def __init__(self, checkpoint: Path, missing: int) -> None:
        self.model = load(checkpoint).eval()
        self.missing = missing
        self.asked = 0

    def __call__(self, url: str, prompt: Any, sampling: Any) -> list[Completion]:
        rng = np.random.default_rng([len(prompt), self.asked])
        tokens = rng.integers(4, 700, LENGTHS[self.asked % len(LENGTHS)]).tolist()
        self.asked += 1
        sequence = torch.tensor([[*prompt, *tokens]])
        config = self.model.config
        shape = (*sequence.shape, config.num_hidden_layers)
        ids = rng.random((*shape, config.num_experts)).argsort(-1)
        routes = torch.from_numpy(ids[..., : config.num_experts_per_tok].copy())
        layers = range(config.num_hidden_layers)
        with torch.no_grad(), replay(self.model, routes, layers):
            logprobs = self.model(sequence).logits[0].log_softmax(-1)
        rows = routes[0].numpy().astype("uint8")[: -1 - self.missing]
        sampled = [logprobs[len(prompt) - 1 + i, t].item() for i, t in enumerate(tokens)]
        return [Completion(tuple(prompt), tuple(tokens), tuple(sampled), rows, 0, tuple(layers))]


class Watched(ReplayTrainer):
    """Keeps the log-probs of the passes that give gradients, and the model's gradients."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.vllm_generation.sync_weights = lambda: None
        self.farthest = 0.0
        self.gradients = 0.0

    def _get_per_token_logps_and_entropies(
        self, model: Any, input_ids: Any, attention_mask: Any, *args: Any, **kwargs: Any
    ) -> Any:
        answer = super()._get_per_token_logps_and_entropies(
            model, input_ids, attention_mask, *args, **kwargs
        )
        known = {(*c.prompt, *c.token_ids): c.logprobs for c in self.completions}
        if torch.is_grad_enabled() and self.state.global_step == 0:
            for ids, mask, found in zip(input_ids, attention_mask, answer[0], strict=True):
                wanted = known.get(tuple(ids[mask.bool()].tolist()), ())
                difference = (found[: len(wanted)] - torch.tensor(wanted)).abs()
                self.farthest = max(self.farthest, *difference.tolist(), 0.0)
        return answer

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        loss = super().training_step(*args, **kwargs)
        if self.state.global_step == 0:  # they add up over the micro-batches
            grads = [p.grad for p in self.model.parameters() if p.grad is not None]
            self.gradients = float(sum(g.double().square().sum() for g in grads) ** 0.5)
        return loss


def run(checkpoint: Path, replays: bool = True, missing: int = 0, **settings: Any) -> Any:
    trl_replay.generate = Stub(checkpoint, missing)  # type: ignore[attr-defined]
    trl_replay.REQUESTS = 1  # in their order
    tokenizer = transformers.AutoTokenizer.from_pretrained(checkpoint)
    options = {"max_steps": 1, "gradient_checkpointing": False, **settings}
    config = GRPOConfig(
        output_dir=str(checkpoint.parent / "trainer"),
        use_cpu=True,
        ddp_backend="gloo" if "RANK" in os.environ else None,
        bf16=False,
        per_device_train_batch_size=6,
        gradient_accumulation_steps=2,
        num_generations=6,
        max_completion_length=max(LENGTHS),
        learning_rate=1e-3,
        shuffle_dataset=False,
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        seed=0,
        **options,
    )
    trainer = Watched(
        load(checkpoint),
        lambda completion_ids, **_: [float(sum(ids) % 7) for ids in completion_ids],
        args=config,
        train_dataset=Dataset.from_dict({"prompt": PROMPTS * 2}),
        processing_class=tokenizer,
        url="",
        weights=checkpoint.parent / "weights",
    )
    trainer.replays = replays
    try:
        trainer.train()
    except ValueError as e:
        return {"error": f"{type(e).__name__}: {e}"}
    return {
        "without gradients": trainer.state.log_history[0]["sampling/sampling_logp_difference/max"],
        "with gradients": trainer.farthest,
        "gradients": trainer.gradients,
        "own choice differs": trainer.state.log_history[0]["routing/own_choice_differs"],
        "wrappers left": any("forward" in vars(x) for x in trainer.model.model.layers),
    }


def without_nccl() -> str:
    """What the recipe says when vLLM has disabled the trainer's communicator."""
    communicator = SimpleNamespace(disabled=True)
    generation = SimpleNamespace(vllm_client=SimpleNamespace(communicator=communicator))
    try:
        trl_replay.check_nccl(generation)
    except RuntimeError as e:
        return str(e)
    return ""


if __name__ == "__main__":
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(1)
    names = sys.argv[3:] or [*CASES]
    found = {name: run(Path(sys.argv[1]), **CASES[name]) for name in names}
    if os.environ.get("RANK", "0") == "0":
        found["without NCCL"] = without_nccl()
        Path(sys.argv[2]).write_text(json.dumps(found, indent=1))
    if torch.distributed.is_initialized():
        # Otherwise its threads may abort this process when it ends.
        torch.distributed.destroy_process_group()
