# SPDX-License-Identifier: Apache-2.0
"""A small stand-in for vLLM with its own clock: a step takes 1 ms, or 1.5 ms if a request asks.

`make_stand_in` writes it into a folder for PYTHONPATH, so that the benchmark can be tested in
seconds.
"""

from __future__ import annotations

from pathlib import Path

VLLM = """
import os, time
from pathlib import Path
from types import SimpleNamespace

import numpy as np

__version__ = "1.2.3"
COSTS = Path(__file__).parents[1] / "costs"
# A clock that only steps move: nothing depends on how busy the machine is.
now = 0.0
time.perf_counter = lambda: now


class SamplingParams:
    return_routed_experts = None

    def __init__(self, **fields):
        self.__dict__.update(fields)


class LLM:
    def __init__(self, model, *, enable_return_routed_experts, **options):
        if (COSTS / "breaks").exists():
            raise RuntimeError("no such engine today")
        self.flag = enable_return_routed_experts
        self.llm_engine = SimpleNamespace(step=lambda: [])

    def collective_rpc(self, name):
        return [{"probe_device": "", "probe_memory": {}}.get(name)]

    def reset_prefix_cache(self):
        return True

    def sleep(self, level):
        self.asleep = True

    def wake_up(self, tags):
        self.asleep = False

    def enqueue(self, prompts, params, use_tqdm):
        assert self.asleep, "a request would run before all are queued"
        self.queued = prompts, params

    def wait_for_completion(self, use_tqdm):
        assert not self.asleep
        prompts, params = self.queued
        asking = [bool(p.return_routed_experts) for p in params]
        steps = params[0].max_tokens
        global now
        for step in range(steps):
            now += 0.001 * (1.5 if any(asking) else 1.0)
            self.llm_engine.step()
        if (COSTS / "dies").exists() and any(asking) and len(prompts) > 1:
            os._exit(3)
        answers = []
        for prompt, asks in zip(prompts, asking):
            ids = prompt["prompt_token_ids"]
            rows = np.zeros((len(ids) + steps - 1, 2, 2), np.uint8) if asks else None
            output = SimpleNamespace(token_ids=[sum(ids) % 97] * steps, routed_experts=rows)
            answers.append(SimpleNamespace(num_cached_tokens=0, outputs=[output]))
        return answers
"""


def make_stand_in(folder: Path) -> Path:
    """Write it; touch `costs/breaks` or `costs/dies` in the folder for engines that do."""
    (folder / "vllm").mkdir(parents=True)
    (folder / "costs").mkdir()
    (folder / "vllm/__init__.py").write_text(VLLM)
    (folder / "torch.py").write_text('__version__ = "4.5"\n')
    return folder
