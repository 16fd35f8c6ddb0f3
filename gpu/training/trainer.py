# SPDX-License-Identifier: Apache-2.0
"""TRL's side, in a process of its own: `python -m gpu.training.trainer SETTINGS`, which is JSON."""

from __future__ import annotations

import base64
import gc
import io
import json
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

from demos.train.with_trl import SAMPLES, SETTINGS, Watched, share_of_even_ids
from examples.client import PATH, Completion, generate, join
from examples.clients.trl_replay import REQUESTS, ReplayTrainer
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


class Interrupted(Watched):
    """Replays rows of rollouts in which new weights interrupt every third sample.

    The old weights sample the first half of its tokens. The new weights resume it. These tokens
    keep their experts, or the router chooses them again.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.replays = True
        self.begun: dict[int, Completion] = {}

    def _generate_single_turn(self, prompts: Sequence[Sequence[int]], *args: Any) -> Any:
        # TRL sends the new weights within this method. In the first step there are no older ones.
        chosen = range(0, len(prompts) if self.state.global_step else 0, 3)
        with ThreadPoolExecutor(REQUESTS) as senders:
            found = senders.map(self._begin, [prompts[i] for i in chosen], chosen)
            self.begun = dict(zip(chosen, found, strict=True))
        return super()._generate_single_turn(prompts, *args)

    def _begin(self, prompt: Sequence[int], index: int) -> Completion:
        half = {"max_tokens": self.max_completion_length // 2}
        return generate(self.url, prompt, {**self.sampling_params(index), **half})[0]

    def _ask(self, prompt: Sequence[int], index: int) -> Completion:
        begun = self.begun.get(index)
        if begun is None:
            return super()._ask(prompt, index)
        tokens = [*prompt, *begun.token_ids]
        params = self.sampling_params(index)
        params["max_tokens"] -= len(begun.token_ids)
        params["seed"] += 500  # else it draws the numbers of the first half again
        params["extra_args"] = {"return_routed_experts": True}
        body = {"token_ids": tokens, "sampling_params": params}
        if self.arm == "forced":
            file = io.BytesIO()
            np.save(file, begun.rows)
            body["forced_routed_experts"] = base64.b64encode(file.getvalue()).decode()
        request = urllib.request.Request(
            self.url + PATH, json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        (rest,) = join(tokens, [json.load(direct.open(request, timeout=600))])
        return replace(
            rest,
            prompt=tuple(prompt),
            token_ids=begun.token_ids + rest.token_ids,
            logprobs=begun.logprobs + rest.logprobs,
        )


TRAINERS = {"plain": WatchedPlain, "routed": Interrupted, "forced": Interrupted}


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
        trainer = TRAINERS.get(arm, Watched)(
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
