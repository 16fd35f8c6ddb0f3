# SPDX-License-Identifier: Apache-2.0
"""TRL's trainer, in an environment of its own:

    build/clients/trl/bin/python -m demos.train.with_trl FOLDER URL STEPS TOKENS FAULT

It trains `FOLDER/checkpoint` without and with replay, each time from the beginning, and appends
what it measures at each step to `FOLDER/steps.jsonl`. A sample has TOKENS tokens. FAULT is a key of
`FAULTS`, or empty.
"""

from __future__ import annotations

import copy
import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from datasets import Dataset
from trl import GRPOConfig

from demos.replay.mismatch import Mismatch
from demos.train import ARMS, STEPS_FILE
from examples.clients.trl_replay import ByReload, ReplayTrainer
from harness import text
from harness.oracle import Comparison, Oracle, compare

# Lengths of the prompts, cut from the passages.
PROMPTS = {"harbour": 160, "sorting": 128, "code": 96, "ledger": 80, "kitchen": 64, "scripts": 48}
SAMPLES, MICRO_BATCHES = 8, 3
# Settings of TRL that every run here has.
SETTINGS: dict[str, Any] = {
    "bf16": True,
    "num_generations": SAMPLES,
    "lr_scheduler_type": "constant",
    "gradient_checkpointing": False,
    "shuffle_dataset": False,
    "logging_steps": 1,
    "report_to": [],
    "save_strategy": "no",
    "disable_tqdm": True,
    "seed": 0,
}


class Sending(ByReload):
    """Sends weights, with the fault of a mutant."""

    fault = ""
    sent = 0

    def sync_weights(self) -> None:
        self.sent += 1
        if self.fault != "weights" or self.sent == 1:
            super().sync_weights()

    def _post(self, path: str, body: Any = None) -> None:
        if self.fault == "cache":
            path = path.replace("clear_cache=true", "clear_cache=false")
        super()._post(path, body)


class Watched(ReplayTrainer):
    """Measures every step of a `ReplayTrainer`."""

    def __init__(self, *args: Any, arm: str, file: Path, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.replays = arm == "replay"
        self.arm = arm
        self.file = file
        self.add_callback(AtEachEnd(self))

    def sampling_params(self, index: int) -> dict[str, Any]:
        seed = 1000 * self.state.global_step + index
        return {**super().sampling_params(index), "seed": seed, "ignore_eos": True}

    def _roll_out(self, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        self.asked = time.monotonic()
        answer = super()._roll_out(*args, **kwargs)
        self.answered = time.monotonic()
        return answer

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        began = time.monotonic()
        output = super()._generate_and_score_completions(inputs)
        delta = output["old_per_token_logps"] - output["sampling_per_token_logps"]
        mask = output["completion_mask"].bool()
        rows = [d[m].double().cpu().numpy() for d, m in zip(delta, mask, strict=True)]
        mismatch = Mismatch(rows, [])
        ratios = np.exp(mismatch.deltas)
        checked = time.monotonic()
        comparison = self._compare()
        self.trains = time.monotonic()
        differs = self._metrics["train"].get("routing/own_choice_differs", [])
        self.step = {
            "arm": self.arm,
            "step": self.state.global_step,
            "tokens": mismatch.deltas.size,
            "mean": mismatch.mean,
            "greatest": float(np.abs(mismatch.deltas).max()),
            "k3": mismatch.k3,
            "outside": float(((ratios < 0.5) | (ratios > 2)).mean()),
            "differs": float(np.mean(differs or 0.0)),
            "rows": comparison.rows,
            "wrong": comparison.rows - comparison.agree,
            "first": str(comparison.disagreements[0]) if comparison.disagreements else "",
            "seconds": {
                "send": self.asked - began,
                "sample": self.answered - self.asked,
                "log-probs": checked - self.answered,
                "check": self.trains - checked,
            },
        }
        return output

    def _compare(self) -> Comparison:
        return Comparison()


class AtEachEnd(transformers.TrainerCallback):
    """Writes what was measured, after the optimizer's step."""

    def __init__(self, trainer: Watched) -> None:
        self.trainer = trainer

    def on_step_end(self, *_: Any, **__: Any) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        step = self.trainer.step
        step["seconds"]["train"] = time.monotonic() - self.trainer.trains
        with self.trainer.file.open("a") as file:
            file.write(json.dumps(step) + "\n")


class WatchedTrainer(Watched):
    """Compares the rows with `transformers` too, and can have the fault of a mutant."""

    def __init__(self, *args: Any, folder: Path, fault: str, **kwargs: Any) -> None:
        super().__init__(*args, weights=folder / "weights", file=folder / STEPS_FILE, **kwargs)
        sender = self.vllm_generation
        self.vllm_generation = Sending(self, self.url, sender.folder, sender.dtype)
        self.vllm_generation.generate = self._roll_out
        self.vllm_generation.fault = self.fault = fault
        self.folder = folder

    def _roll_out(self, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        answer = super()._roll_out(*args, **kwargs)
        if self.fault == "rows":
            self.completions = [
                replace(c, rows=np.roll(c.rows, 1, axis=0)) for c in self.completions
            ]
        return answer

    def _compare(self) -> Comparison:
        """All rows of the rollout against the weights that the trainer has now."""
        model = copy.deepcopy(self.accelerator.unwrap_model(self.model))
        model.to(torch.bfloat16).save_pretrained(self.folder / "truth")
        oracle, total = Oracle(self.folder / "truth"), Comparison()
        for c in self.completions:
            total += compare(c.rows, oracle.route([*c.prompt, *c.token_ids]), c.start)
        return total


def share_of_even_ids(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """A reward that the model can follow."""
    return [float(np.mean([token % 2 == 0 for token in ids])) for ids in completion_ids]


def train(folder: Path, url: str, steps: int, tokens: int, fault: str) -> None:
    """Train both ways with the same seeds."""
    torch.set_num_threads(1)  # the model is small, and the server computes beside it
    transformers.utils.logging.disable_progress_bar()
    checkpoint = folder / "checkpoint"
    tokenizer = transformers.AutoTokenizer.from_pretrained(checkpoint)
    prompts = [
        tokenizer.decode(tokenizer(text.PASSAGES[name])["input_ids"][:length])
        for name, length in PROMPTS.items()
    ]
    for arm in ARMS:
        config = GRPOConfig(
            output_dir=str(folder / "trainer"),
            use_cpu=True,
            per_device_train_batch_size=len(PROMPTS) * SAMPLES // MICRO_BATCHES,
            gradient_accumulation_steps=MICRO_BATCHES,
            max_completion_length=tokens,
            max_steps=steps,
            learning_rate=1e-3,
            **SETTINGS,
        )
        trainer = WatchedTrainer(
            transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32),
            share_of_even_ids,
            args=config,
            train_dataset=Dataset.from_dict({"prompt": prompts * steps}),
            processing_class=tokenizer,
            url=url,
            weights_dtype=torch.bfloat16,
            folder=folder,
            arm=arm,
            fault=fault,
        )
        trainer.train()
        (folder / f"{arm}.json").write_text(json.dumps(trainer.state.log_history))


if __name__ == "__main__":
    train(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), sys.argv[5])
