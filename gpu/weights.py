# SPDX-License-Identifier: Apache-2.0
"""Compare weights of routed experts on GPUs with the routers of `transformers`.

    python -m gpu.weights --out DIR [--layouts one tp2 ...] [--families N ...] [--dtypes ...]

Each engine has a small random checkpoint, CUDA graphs and a prefix cache. It answers prompts whose
prefix is not cached, and then longer ones whose prefix is. Engines run beside each other. In
float32, Triton computes products exactly, not in TF32, and weights differ by at most 1e-5. In
bfloat16, hidden states are rounded to 8 bits: the table says by how much weights differ where the
ids agree. In layout `half`, weights are sent in float16. `DIR/weights.json` and `DIR/weights.md`
have the results so far. The exit status is the number of failed engines. `--tiny` is for a CPU.

What weights cost is measured by `python -m benchmarks.overhead --engine patched:opt-in --engine
patched:float32 --modes all,both`.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import itertools
import json
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import table
from gpu.layouts.running import PORTS, device_environment
from harness import hosts
from harness.checkpoint import make_checkpoint
from harness.lines import LINES, installed
from harness.weights import CLOSE, WAYS, differences

Job = tuple[str, str, str]  # family, dtype, layout
DTYPES = ("float32", "bfloat16")
# In bfloat16, the weights of 99 in 100 decisions differ by less.
ROUNDED = 0.1
LENGTHS = (5, 150, 64, 33)
NEW = 8
OPTIONS: dict[str, Any] = {
    "max_model_len": 512,
    "max_num_batched_tokens": 64,
    "max_num_seqs": 8,
    "block_size": 32,
    "enable_prefix_caching": True,
    "enable_return_routed_experts": True,
    "skip_tokenizer_init": True,
    "kv_cache_memory_bytes": 256 << 20,
    "gpu_memory_utilization": 0.02,
    "disable_custom_all_reduce": True,
    "seed": 0,
}
GRAPHS = {"compilation_config": {"cudagraph_capture_sizes": [1, 2, 4, 8, 64]}}
# Engine options, data parallel ranks, GPUs, and dtype of the weights.
LAYOUTS: dict[str, tuple[dict[str, Any], int, int, str]] = {
    "one": ({}, 1, 1, "float32"),
    "half": ({}, 1, 1, "float16"),
    "tp2": ({"tensor_parallel_size": 2}, 1, 2, "float32"),
    "pp2": ({"pipeline_parallel_size": 2}, 1, 2, "float32"),
    "dp2ep2": ({"enable_expert_parallel": True}, 2, 2, "float32"),
}


def run_engine(spec: dict[str, Any]) -> None:
    """Run one engine, in a process of its own. It answers its prompts, and then longer ones."""
    from vllm import LLM, SamplingParams

    scratch, rank, size = Path(spec["scratch"]), spec["rank"], spec["dp"]
    llm = LLM(spec["model"], **spec["options"])
    params = SamplingParams(
        temperature=0.0, ignore_eos=True, max_tokens=NEW, return_routed_experts_weights=True
    )
    rng = np.random.default_rng(rank)
    prompts = [[int(t) for t in rng.integers(4, 700, length)] for length in LENGTHS]
    for turn in ("cold", "hit"):
        given = [{"prompt_token_ids": prompt} for prompt in prompts]
        for number, output in enumerate(llm.generate(given, params, use_tqdm=False)):
            (answer,) = output.outputs
            tokens = [*prompts[number], *answer.token_ids]
            np.savez(
                scratch / f"{turn}-{rank}-{number}.npz",
                tokens=tokens,
                rows=answer.routed_experts,
                weights=answer.routed_experts_weights,
                cached=output.num_cached_tokens,
            )
            prompts[number] = [*tokens, 7]
        hosts.meet(scratch, turn, rank, size)
    hosts.meet(scratch, "done", rank, size)
    hosts.leave(llm)


def run_job(given: argparse.Namespace, model: Path, scratch: Path, slot: int, job: Job) -> str:
    """Run the engines of a job; returns why they did not finish, or nothing."""
    _, dtype, layout = job
    options, ranks, gpus, weights = LAYOUTS[layout]
    options = {**OPTIONS, **options, "dtype": dtype, "routed_experts_weights": weights}
    if given.tiny:
        line = LINES[installed()]
        environment = device_environment("cpu", gpus, slot, gpus) | line.variables()
        # Else the second rank finds no memory node.
        environment["VLLM_CPU_SIM_MULTI_NUMA"] = "0"
        # The CPU's kernel takes all experts only.
        options |= {**line.engine, "enforce_eager": True, "enable_expert_parallel": False}
    else:
        import torch

        count = torch.cuda.device_count()
        if count < gpus:
            return f"needs {gpus} GPUs, this host has {count}"
        environment = device_environment("cuda", gpus, slot, count)
        options |= GRAPHS
    if dtype == "float32":
        environment["TRITON_F32_DEFAULT"] = "ieee"
    specs = [
        {"model": str(model), "options": options, "rank": rank, "dp": ranks, "scratch": scratch}
        for rank in range(ranks)
    ]
    with hosts.ranks("gpu.weights", specs, scratch, environment, next(PORTS)) as engines:
        why = hosts.wait(engines, scratch, given.engine_seconds)
        causes = {engine.first_error() for engine in engines} - {""}
        return "; ".join([why, *(c for c in causes if c not in why)]) if why else ""


def compare(model: Path, scratch: Path, factor: float, job: Job) -> dict[str, Any]:
    """Compare the answers of a job with `transformers`."""
    _, dtype, layout = job
    result: dict[str, Any] = {"cached": 0}
    found, same = [], []
    for file in sorted(scratch.glob("*.npz")):
        answer = np.load(file)
        rows, weights = answer["rows"], answer["weights"]
        assert weights.dtype == LAYOUTS[layout][3]
        assert weights.shape == rows.shape
        assert len(rows) == len(answer["tokens"]) - 1
        result["cached"] += int(answer["cached"])
        one, two = differences(model, answer["tokens"].tolist(), rows, weights, factor)
        found.append(one)
        same.append(two)
    equal = np.concatenate(same)
    errors = np.concatenate(found)[equal]
    quantiles = np.quantile(errors, [0.5, 0.99, 1.0]).tolist()
    result |= {"decisions": equal.size, "same": float(equal.mean())}
    result |= dict(zip(("median", "99 %", "most"), quantiles, strict=True))
    if dtype == "float32":
        # Numbers below 1 in float16 differ by up to 2**-12.
        close = CLOSE if layout != "half" else CLOSE + 2**-12
        result["good"] = result["most"] <= close and result["same"] > 0.99
    else:
        result["good"] = result["99 %"] < ROUNDED and result["same"] > 0.8
    return result


def run_all(given: argparse.Namespace, work: Path) -> int:
    families = [list(WAYS)[place] for place in given.families]
    jobs = list(itertools.product(families, given.dtypes, given.layouts))
    models = {
        name: make_checkpoint(work / name, name, dtype="bfloat16", **WAYS[name][0])
        for name in families
    }
    results: list[dict[str, Any]] = []
    began = time.monotonic()
    with concurrent.futures.ThreadPoolExecutor(given.together) as pool:

        def start(slot: int, job: Job) -> tuple[Job, Path, str, float]:
            scratch = work / "-".join(job)
            scratch.mkdir()
            started = time.monotonic()
            why = run_job(given, models[job[0]], scratch, slot, job)
            return job, scratch, why, time.monotonic() - started

        running = [pool.submit(start, slot, job) for slot, job in enumerate(jobs)]
        for done in concurrent.futures.as_completed(running):
            job, scratch, why, seconds = done.result()
            result = dict(zip(("family", "dtype", "layout"), job, strict=True))
            try:
                result |= (
                    {"why": why} if why else compare(models[job[0]], scratch, WAYS[job[0]][1], job)
                )
            except Exception as error:
                traceback.print_exc()
                result["why"] = repr(error)[:300]
            if not result.get("good"):
                for log in sorted(scratch.glob("*.log")):
                    (given.out / f"{scratch.name}-{log.name}").write_bytes(
                        log.read_bytes()[-20000:]
                    )
            results.append(result | {"seconds": round(seconds, 1)})
            told = {k: f"{v:.2g}" if isinstance(v, float) else v for k, v in result.items()}
            print(f"[{time.monotonic() - began:.0f} s] {told}", flush=True)
            write(given.out, results)
    wrong = sum(not result.get("good") for result in results)
    print(f"{len(results)} engines, {wrong} failed", flush=True)
    return wrong


def write(out: Path, results: list[dict[str, Any]]) -> None:
    (out / "weights.json").write_text(json.dumps(results, indent=1))
    names = ("family", "dtype", "layout", "decisions", "same", "median", "99 %", "most", "cached")
    lines = [
        [
            *(f"{v:.2g}" if isinstance(v := result.get(name, ""), float) else v for name in names),
            "right" if result.get("good") else f"WRONG: {result.get('why', 'too far')}",
        ]
        for result in results
    ]
    (out / "weights.md").write_text(table((*names, "result"), lines))


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m gpu.weights", description=(__doc__ or "").split("\n\n")[0]
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for results")
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=["one"])
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument(
        "--families",
        type=int,
        nargs="+",
        default=range(len(WAYS)),
        metavar="N",
        help="; ".join(f"{place} {name}" for place, name in enumerate(WAYS)),
    )
    parser.add_argument("--together", type=int, default=6, help="engines at a time")
    parser.add_argument("--engine-seconds", type=float, default=120, help="the most for an engine")
    parser.add_argument("--tiny", action="store_true", help="on a CPU")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="weights-") as work:
        return run_all(given, Path(work))


if __name__ == "__main__":
    if len(sys.argv) == 2 and sys.argv[1].endswith(".json"):
        hosts.run(run_engine)
    sys.exit(main())
