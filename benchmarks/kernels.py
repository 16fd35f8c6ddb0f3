# SPDX-License-Identifier: Apache-2.0
"""Counts the kernels and copies of a decode step on a GPU, with one build of vLLM.

    python -m benchmarks.kernels --flag off --out off.json
    python -m benchmarks.kernels --flag opt-in --out opt-in.json

One request decodes alone, with CUDA graphs, on the shape of Qwen3-30B-A3B with fewer layers and
dummy weights. The kernels of a step are those that 64 more tokens add, divided by 64. `opt-in`
needs the patched build; its request is silent first, then asks.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks.probe import kernels_of_a_step
from harness.shapes import QWEN3_30B_A3B as CONFIG

FEW, MANY = 8, 72
MODES: dict[str, dict[str, bool | None]] = {
    "off": {"off": None},
    "opt-in": {"silent": False, "asks": True},
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--flag", choices=MODES, required=True)
    parser.add_argument("--out", type=Path, required=True, help="file for the record")
    parser.add_argument("--layers", type=int, default=8)
    arguments = parser.parse_args()
    # One process, so that the worker can import the probe.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

    import torch
    import vllm
    from vllm import LLM, SamplingParams

    with tempfile.TemporaryDirectory() as folder:
        config = {**CONFIG, "num_hidden_layers": arguments.layers}
        Path(folder, "config.json").write_text(json.dumps(config))
        options: dict[str, Any] = {}
        if arguments.flag == "opt-in":
            options = {"enable_return_routed_experts": True, "routed_experts_opt_in": True}
        llm = LLM(
            folder,
            load_format="dummy",
            skip_tokenizer_init=True,
            worker_extension_cls="benchmarks.probe.Probe",
            max_model_len=1024,
            max_num_batched_tokens=1024,
            enable_prefix_caching=False,
            gpu_memory_utilization=0.4,
            compilation_config={"cudagraph_capture_sizes": [1, 2, 4, 8]},
            **options,
        )

        def count(asks: bool | None, max_tokens: int) -> Counter[str]:
            """What ran on the device for one request, by kernel's name or kind of copy."""
            params = SamplingParams(
                temperature=0.0,
                ignore_eos=True,
                max_tokens=max_tokens,
                detokenize=False,
                extra_args=None if asks is None else {"return_routed_experts": asks},
            )
            llm.collective_rpc("probe_profile_start")
            (output,) = llm.generate([{"prompt_token_ids": [11] * 16}], params, use_tqdm=False)
            assert (output.outputs[0].routed_experts is not None) == bool(asks)
            return Counter(llm.collective_rpc("probe_profile_stop")[0])

        steps = {}
        for mode, asks in MODES[arguments.flag].items():
            count(asks, FEW)  # warms up
            few, many = count(asks, FEW), count(asks, MANY)
            steps[mode] = kernels_of_a_step(few, many, MANY - FEW)
            kernels, copies = (steps[mode][what] for what in ("kernels", "copies"))
            print(f"{mode}: {kernels} kernels, {copies} copies a step", flush=True)
    record = {
        # Names only: records hold no paths.
        "command": [Path(word).name for word in sys.argv],
        "vllm": vllm.__version__,
        "torch": torch.__version__,
        "gpu": torch.cuda.get_device_name(),
        "model": "Qwen3-30B-A3B shape, dummy weights, bfloat16",
        "layers": arguments.layers,
        "steps": steps,
    }
    arguments.out.write_text(json.dumps(record, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
