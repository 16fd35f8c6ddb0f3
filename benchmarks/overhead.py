# SPDX-License-Identifier: Apache-2.0
"""What routed experts cost on a GPU: seconds of three loads with one build of vLLM.

    python benchmarks/overhead.py --flag off --out off.json
    python benchmarks/overhead.py --flag on --out on.json
    python benchmarks/overhead.py --flag opt-in --out opt-in.json

Real shapes with dummy weights. One engine serves all loads; with `opt-in` (the patched build) the
requests of a round are all silent, one in ten asks, or all ask, in turn. Seconds are the minimum
and median of the rounds. Compare only within one run on one machine.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

# Qwen3-30B-A3B.
CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "attention_bias": False,
    "bos_token_id": 151643,
    "decoder_sparse_step": 1,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "max_position_embeddings": 40960,
    "mlp_only_layers": [],
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 151936,
}
# name: requests, prompt tokens, output tokens
LOADS = {"decode": (128, 128, 384), "prefill": (128, 2048, 16), "single": (1, 64, 256)}
SHARES = {"silent": 0.0, "tenth": 0.1, "all": 1.0}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--flag", choices=["off", "on", "opt-in"], required=True)
    parser.add_argument("--out", type=Path, required=True, help="file for the record")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--layers", type=int, default=CONFIG["num_hidden_layers"])
    arguments = parser.parse_args()
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "1")

    import numpy as np
    import torch
    import vllm
    from vllm import LLM, SamplingParams

    with tempfile.TemporaryDirectory() as folder:
        config = {**CONFIG, "num_hidden_layers": arguments.layers}
        Path(folder, "config.json").write_text(json.dumps(config))
        options: dict[str, Any] = {"enable_return_routed_experts": arguments.flag != "off"}
        if arguments.flag == "opt-in":
            options["routed_experts_opt_in"] = True
        llm = LLM(
            folder,
            load_format="dummy",
            skip_tokenizer_init=True,
            max_model_len=4096,
            max_num_batched_tokens=16384,
            max_num_seqs=128,
            enable_prefix_caching=False,
            gpu_memory_utilization=0.85,
            compilation_config={"cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32, 64, 128]},
            **options,
        )
        rng = np.random.default_rng(0)
        modes = SHARES if arguments.flag == "opt-in" else {arguments.flag: None}
        seconds: dict[str, dict[str, list[float]]] = {
            load: {m: [] for m in modes} for load in LOADS
        }
        tokens: dict[str, set[int]] = {load: set() for load in LOADS}
        for number in range(arguments.rounds + 1):
            for load, (count, prompt_len, output_len) in LOADS.items():
                prompts = [
                    {"prompt_token_ids": rng.integers(10, 150000, prompt_len).tolist()}
                    for _ in range(count)
                ]
                for mode, share in modes.items():
                    params = [
                        SamplingParams(
                            temperature=0.0,
                            ignore_eos=True,
                            max_tokens=output_len,
                            detokenize=False,
                            extra_args=None
                            if share is None
                            else {"return_routed_experts": i < share * count},
                        )
                        for i in range(count)
                    ]
                    began = time.perf_counter()
                    outputs = llm.generate(prompts, params, use_tqdm=False)
                    took = time.perf_counter() - began
                    # The first round warms up.
                    if number:
                        seconds[load][mode].append(took)
                    with_rows = [o.outputs[0].routed_experts is not None for o in outputs]
                    wanted = (
                        sum(i < share * count for i in range(count)) if share is not None else 0
                    )
                    assert share is None or sum(with_rows) == wanted, (mode, sum(with_rows))
                    tokens[load].add(hash(tuple(tuple(o.outputs[0].token_ids) for o in outputs)))
                print(
                    f"round {number} {load}: "
                    + ", ".join(f"{m} {(v or [0.0])[-1]:.3f}" for m, v in seconds[load].items()),
                    flush=True,
                )
    record = {
        # Names only: a record says nothing of the machine's folders.
        "command": [Path(word).name for word in sys.argv],
        "vllm": vllm.__version__,
        "torch": torch.__version__,
        "gpu": torch.cuda.get_device_name(),
        "model": "Qwen3-30B-A3B shape, dummy weights, bfloat16",
        "layers": arguments.layers,
        "loads": LOADS,
        "seconds": seconds,
        "minimum": {p: {m: min(v) for m, v in s.items()} for p, s in seconds.items()},
        "median": {p: {m: statistics.median(v) for m, v in s.items()} for p, s in seconds.items()},
    }
    arguments.out.write_text(json.dumps(record, indent=1) + "\n")
    print(json.dumps({"minimum": record["minimum"], "median": record["median"]}, indent=1))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
