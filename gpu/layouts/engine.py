# SPDX-License-Identifier: Apache-2.0
"""One offline engine of a layout, in a process of its own.

python -m gpu.layouts.engine SPEC.json
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from gpu.layouts.answers import save_answer
from gpu.layouts.cells import LENGTHS, asks, make_prompts
from harness.hosts import leave


def run_engine(spec: dict[str, Any]) -> None:
    """Run one engine; all engines of a data parallel group run this at the same time."""
    scratch = Path(spec["scratch"])
    rank, size = spec["rank"], spec["dp"]
    try:
        from vllm import LLM, SamplingParams

        llm = LLM(spec["model"], **spec["options"])
    except Exception as e:
        (scratch / f"error-{rank}.txt").write_text(f"{type(e).__name__}: {e}")
        raise
    if spec["spread"]:
        llm.collective_rpc("spread_routers", args=(spec["spread"],))
    if spec["records"]:
        llm.collective_rpc("record_start")
    indices = range(rank, len(LENGTHS), size)
    prompts = make_prompts()
    params = [
        SamplingParams(
            temperature=0.0,
            ignore_eos=True,
            max_tokens=spec["tokens"],
            detokenize=False,
            return_routed_experts=asks(i),
        )
        for i in indices
    ]
    outputs = llm.generate(
        [{"prompt_token_ids": prompts[i]} for i in indices], params, use_tqdm=False
    )
    for i, output in zip(indices, outputs, strict=True):
        completion = output.outputs[0]
        save_answer(
            scratch,
            i,
            list(completion.token_ids),
            completion.routed_experts,
            getattr(completion, "routed_experts_start", 0),
            getattr(completion, "moe_layers", None),
        )
    # A rank that ends breaks the collectives of the others: wait for them.
    (scratch / f"generated-{rank}").touch()
    while len(list(scratch.glob("generated-*"))) < size:
        time.sleep(0.1)
    if spec["records"]:
        llm.collective_rpc("record_flush", args=(str(scratch / f"logits{rank}"),))
    (scratch / f"done-{rank}").touch()
    while len(list(scratch.glob("done-*"))) < size:
        time.sleep(0.1)
    leave(llm)


if __name__ == "__main__":
    run_engine(json.loads(Path(sys.argv[1]).read_text()))
