# SPDX-License-Identifier: Apache-2.0
"""TRL's side, in a process of its own: `python -m gpu.training.trainer SETTINGS`, which is JSON."""

from __future__ import annotations

import gc
import json
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import torch
import transformers
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

from demos.train.with_trl import SAMPLES, SETTINGS, Watched, share_of_even_ids
from examples.client import PATH, Completion
from examples.clients.trl_replay import ReplayTrainer
from gpu.training import STEPS_FILE
from harness import text
from harness.server import NO_ROWS

direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class Plain(ReplayTrainer):
    """Asks for no rows and does not replay. Except for the rollouts, it runs TRL's own code."""

    def _ask(self, prompt: Any, index: int) -> Completion:
        body = {"token_ids": prompt, "sampling_params": self.sampling_params(index)}
        request = urllib.request.Request(
            self.url + PATH, json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        choice = json.load(direct.open(request, timeout=600))["choices"][0]
        logprobs = tuple(each["logprob"] for each in choice["logprobs"]["content"])
        return Completion(tuple(prompt), tuple(choice["token_ids"]), logprobs, NO_ROWS, 0, ())

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        return GRPOTrainer._generate_and_score_completions(self, inputs)

    def _compute_loss(self, model: Any, inputs: Any) -> Any:
        return GRPOTrainer._compute_loss(self, model, inputs)

    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> Any:
        return GRPOTrainer._get_per_token_logps_and_entropies(self, *args, **kwargs)


class WatchedPlain(Watched, Plain):
    """Measures every step of `Plain`."""


class Until(transformers.TrainerCallback):
    """Ends the training before a step that would be late."""

    def __init__(self, end: float) -> None:
        self.end = end
        self.began = time.time()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        now = time.time()
        if now + (now - self.began) > self.end:
            control.should_training_stop = True
        self.began = now


def wait_for(url: str, end: float) -> None:
    """Until the server answers. Its caller ends this process if the server ends."""
    while time.time() < end:
        try:
            direct.open(url + "/health", timeout=5).read()
            return
        except OSError:
            time.sleep(0.5)


def main(given: dict[str, Any]) -> None:
    transformers.utils.logging.disable_progress_bar()
    on_gpu = torch.cuda.is_available()
    if not on_gpu:
        torch.set_num_threads(1)
    checkpoint, work = Path(given["checkpoint"]), Path(given["work"])
    tokenizer = transformers.AutoTokenizer.from_pretrained(checkpoint)
    ids = tokenizer(" ".join(text.PASSAGES.values()))["input_ids"]
    prompts = [
        tokenizer.decode(ids[at : at + 64 + 16 * (i % 8)])
        for i in range(given["prompts"] * max(given["steps"].values()))
        for at in [37 * i % (len(ids) - 192)]
    ]
    wait_for(given["url"], given["end"])
    began = time.time()
    for number, (arm, steps) in enumerate(given["steps"].items()):
        batch = given["prompts"] * SAMPLES
        nccl = {
            "use_vllm": True,
            "vllm_mode": "server",
            "vllm_server_base_url": given["url"],
            "vllm_group_port": 51216 + number,
        }
        config = GRPOConfig(
            output_dir=str(work / "trainer"),
            use_cpu=not on_gpu,
            per_device_train_batch_size=batch // given["micro_batches"],
            gradient_accumulation_steps=given["micro_batches"],
            max_completion_length=given["tokens"],
            max_steps=steps,
            learning_rate=given["learning_rate"],
            **SETTINGS,
            **(nccl if given["nccl"] else {}),
        )
        trainer = (WatchedPlain if arm == "plain" else Watched)(
            transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16),
            share_of_even_ids,
            args=config,
            train_dataset=Dataset.from_dict({"prompt": prompts[: given["prompts"] * steps]}),
            processing_class=tokenizer,
            url=given["url"],
            weights=work / "weights",
            arm=arm,
            file=Path(given["out"]) / STEPS_FILE,
        )
        share = given["shares"][arm]
        trainer.add_callback(Until(began + share * (given["end"] - began)))
        trainer.train()
        del trainer
        gc.collect()
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
