# SPDX-License-Identifier: Apache-2.0
"""One offline engine of a layout, in a process of its own.

python -m gpu.layouts.engine SPEC.json
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from examples.client import Completion
from gpu.layouts.answers import save_answer
from gpu.layouts.cells import LENGTHS, asks, make_prompts
from harness import hosts
from harness.server import NO_ROWS


def run_engine(spec: dict[str, Any]) -> None:
    """Run one engine; all engines of a data parallel group run this at the same time."""
    scratch = Path(spec["scratch"])
    rank, size = spec["rank"], spec["dp"]
    from vllm import LLM, SamplingParams

    llm = LLM(spec["model"], **spec["options"])
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
        rows = completion.routed_experts
        answer = Completion(
            prompt=tuple(prompts[i]),
            token_ids=tuple(completion.token_ids),
            logprobs=(),
            rows=NO_ROWS if rows is None else rows,
            start=getattr(completion, "routed_experts_start", None) or 0,
            moe_layers=tuple(getattr(completion, "moe_layers", None) or ()),
        )
        save_answer(scratch, i, answer)
    hosts.meet(scratch, "generated", rank, size)
    if spec["records"]:
        llm.collective_rpc("record_flush", args=(str(scratch / f"logits{rank}"),))
    hosts.meet(scratch, "done", rank, size)
    hosts.leave(llm)


if __name__ == "__main__":
    hosts.run(run_engine)
