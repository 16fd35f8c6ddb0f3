# SPDX-License-Identifier: Apache-2.0
"""One engine of one build; `overhead.py` commands it over a socket.

    python -m benchmarks.overhead.worker SOCKET SETTINGS

Messages are dictionaries. The first one says that vLLM is imported. Then each message
`{"do": NAME, ...}` calls the method of that name, and is answered with what it returns, or with an
"error".
"""

from __future__ import annotations

import gc
import hashlib
import json
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Client
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.overhead.loads import MODES, Load, loads_of
from harness.shapes import model_config, write_model


def settle() -> None:
    """Collect garbage, and exempt the remaining objects from later collections."""
    gc.collect()
    gc.freeze()


class Settled:
    """Mixed into vLLM's worker."""

    def settle(self) -> None:
        settle()


class Engine:
    """The engine, and the commands that it takes."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.settings = settings
        self.loads = loads_of(settings["model"])
        self.vocab = model_config(settings["model"])["vocab_size"]
        self.returned: list[float] = []

    def start(self) -> dict[str, Any]:
        """Start the engine. Answers with versions and device."""
        import torch
        import vllm
        from vllm import LLM
        from vllm.platforms import current_platform

        with tempfile.TemporaryDirectory() as folder:
            write_model(Path(folder), self.settings["model"], self.settings["layers"])
            self.llm = LLM(
                folder,
                load_format="dummy",
                skip_tokenizer_init=True,
                worker_extension_cls="benchmarks.overhead.worker.Settled",
                **self.settings["options"],
            )
        step = self.llm.llm_engine.step

        def timed_step() -> Any:
            outputs = step()
            self.returned.append(time.perf_counter())
            return outputs

        self.llm.llm_engine.step = timed_step
        self._generate([[11] * 16], [None], 2)
        return {
            "vllm": vllm.__version__,
            "torch": torch.__version__,
            "gpu": current_platform.get_device_name() if current_platform.is_cuda() else "",
        }

    def _forget(self) -> None:
        """Empty the prefix cache; a running step may hold blocks for a moment."""
        for _ in range(100):
            if self.llm.reset_prefix_cache():
                return
            time.sleep(0.01)
        raise RuntimeError("the prefix cache cannot be emptied")

    def _generate(
        self,
        prompts: list[list[int]],
        asks: list[bool | None],
        max_tokens: int,
        weights: bool = False,
    ) -> tuple[list[Any], float]:
        """Outputs, and the seconds to the last one from all requests being queued, since how fast
        they come in would decide which of them share the first steps."""
        from vllm import SamplingParams

        params = [
            SamplingParams(
                temperature=0.0,
                ignore_eos=True,
                max_tokens=max_tokens,
                detokenize=False,
                **({} if ask is None else {"return_routed_experts": ask}),
                **({"return_routed_experts_weights": True} if weights else {}),
            )
            for ask in asks
        ]
        inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
        self.returned.clear()
        self.llm.sleep(level=0)
        self.llm.enqueue(inputs, params, use_tqdm=False)
        began = time.perf_counter()
        self.llm.wake_up(tags=["scheduling"])
        return self.llm.wait_for_completion(use_tqdm=False), time.perf_counter() - began

    def run(self, load: str, mode: str, number: int) -> dict[str, Any]:
        """One timed round; answers seconds, microseconds of a step and what came of it.

        The step's microseconds are the median of the times between two steps' outputs; other
        quantiles show what disturbed the round.
        """
        what: Load = self.loads[load]
        key = f"{load} {number}"
        asks = what.asks(mode)
        prompts = what.first_prompts(key, self.vocab)
        later = [what.later_tokens(f"{key} {turn}", self.vocab) for turn in range(1, what.turns)]
        # Warms the GPU and the caches after the turn of another engine.
        self._generate([[11] * 256], [False if mode in MODES else None], 8)
        # Every round begins with an empty prefix cache: engines take turns with the same prompts.
        self.llm.collective_rpc("settle")
        self._forget()
        settle()
        gc.disable()
        digest = hashlib.sha256()
        rows = rows_bytes = cached = 0
        seconds = 0.0
        intervals: list[float] = []
        outputs: list[Any] = []
        for turn in range(what.turns):
            if turn:
                prompts = [
                    prompt + list(output.outputs[0].token_ids) + added
                    for prompt, output, added in zip(prompts, outputs, later[turn - 1], strict=True)
                ]
            outputs, took = self._generate(prompts, asks, what.output, weights=mode == "both")
            seconds += took
            intervals += np.diff(self.returned).tolist()
            for prompt, output, ask in zip(prompts, outputs, asks, strict=True):
                completion = output.outputs[0]
                digest.update(np.array(completion.token_ids, np.int64).tobytes())
                cached += output.num_cached_tokens or 0
                got = getattr(completion, "routed_experts", None)
                if ask is not None:
                    wanted = len(prompt) + what.output - 1 if ask else 0
                    if wanted != (0 if got is None else len(got)):
                        raise RuntimeError(f"{mode}: {wanted} rows wanted, got {got!r}")
                if got is not None:
                    rows += len(got)
                    rows_bytes += got.nbytes
                weights = getattr(completion, "routed_experts_weights", None)
                if (mode == "both") != (weights is not None):
                    raise RuntimeError(f"{mode}: got weights {weights!r}")
                if weights is not None:
                    rows_bytes += weights.nbytes
        gc.enable()
        quantiles = np.quantile(intervals or [0.0], [0.1, 0.5, 0.9, 0.99, 1.0]) * 1e6
        return {
            "seconds": seconds,
            "step_us": float(quantiles[1]) if what.decodes else None,
            "step_us_quantiles": [round(q, 1) for q in quantiles.tolist()],
            "steps": len(intervals) + what.turns,
            "tokens": digest.hexdigest()[:16],
            "rows": rows,
            "rows_bytes": rows_bytes,
            "cached_tokens": cached,
        }


def main() -> int:
    path, settings = sys.argv[1], json.loads(sys.argv[2])
    connection = Client(path)

    # All of vLLM: its own module imports next to nothing.
    from vllm import LLM, SamplingParams  # noqa: F401

    connection.send({"hello": settings["name"]})
    engine = Engine(settings)
    methods: dict[str, Callable[..., Any]] = {
        "start": engine.start,
        "run": engine.run,
    }
    while True:
        try:
            message = connection.recv()
        except EOFError:
            return 0
        try:
            connection.send(methods[message.pop("do")](**message))
        except Exception as error:
            traceback.print_exc()
            connection.send({"error": f"{type(error).__name__}: {error}"})


if __name__ == "__main__":
    raise SystemExit(main())
