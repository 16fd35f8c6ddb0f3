# SPDX-License-Identifier: Apache-2.0
"""Asynchronous EPLB on two GPUs (DP2, EP2), compared with the same engines without EPLB; then its
worker thread is killed.

    python -m gpu.eplb --out DIR

Each rank is an offline engine in its own process, with a small random checkpoint in float32 without
TF32. The placement of experts decides in which order the sums of two GPUs are added; in bfloat16
that would be enough to route a token differently. Both modes get the same prompts at once, so their
batches are equal. Then rank 0's worker thread is killed, and the engines of both ranks must raise
its error and end.

`--device cpu` tests the program itself. vLLM has no EPLB on a CPU, so EPLB runs there on weights
that the model does not use, and changes no output.

Writes `off-<rank>.json` and `on-<rank>.json` with `.npz` files, logs, and `result.json` with the
findings and `"good"`; the exit status is 0 if that is true. If a rank fails, the run ends and
prints the last lines of all logs. `--minutes` limits the whole run.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import numpy as np

from harness import hosts
from harness.checkpoint import make_checkpoint
from harness.process import free_port

WORLD_SIZE = 2
NUM_EXPERTS = 64
REDUNDANT_EXPERTS = 4
INTERMEDIATE_SIZE = 128
STAND_IN_LAYERS = 2
LEAST_REBALANCES = 4
LEAST_EQUAL_SEQUENCES = 0.97
LEAST_EQUAL_ROWS = 0.999
ENVIRONMENT = {
    **hosts.environment(),
    # Runs the engine core in this process, so that its errors keep their text.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    # Triton would round float32 factors to TF32, which multiplies the noise of another order of
    # sums.
    "TRITON_F32_DEFAULT": "ieee",
}


def prompts(rank: int, round_: int, count: int) -> list[list[int]]:
    """Each round takes another part of the vocabulary, so that the expert load moves."""
    rng = np.random.default_rng(100 * round_ + rank)
    first = 4 + 150 * (round_ % 4)
    return [rng.integers(first, first + 150, rng.integers(16, 200)).tolist() for _ in range(count)]


def eplb_config(args: argparse.Namespace) -> dict[str, Any]:
    return {
        "use_async": True,
        "step_interval": args.step_interval,
        "window_size": max(1, args.step_interval // 2),
        "num_redundant_experts": REDUNDANT_EXPERTS,
        "communicator": "torch_gloo",
    }


def engine_options(args: argparse.Namespace) -> dict[str, Any]:
    options: dict[str, Any] = {
        "dtype": "float32",
        "max_model_len": 512,
        "max_num_batched_tokens": 512,
        "max_num_seqs": args.requests,
        "enable_prefix_caching": False,
        "enable_return_routed_experts": True,
        "async_scheduling": False,
        "worker_extension_cls": "gpu.eplb.watch.Watch",
        "seed": 0,
    }
    if args.device == "cpu":
        return {**options, "enforce_eager": True, "kv_cache_memory_bytes": 256 << 20}
    options |= {
        "attention_config": {"backend": "TRITON_ATTN"},
        "enable_expert_parallel": True,
        "gpu_memory_utilization": 0.3,
        "kv_cache_memory_bytes": 1 << 30,
        "enforce_eager": args.eager,
    }
    if not args.eager:
        options["compilation_config"] = {"cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32, 64]}
    if args.mode == "on":
        options |= {"enable_eplb": True, "eplb_config": eplb_config(args)}
    return options


def choose_tiles(folder: Path) -> None:
    """Use the same tiles for all batches and both numbers of local experts, so that sums have one
    order. Tiles are small because float32 without TF32 uses no tensor cores."""
    from vllm.model_executor.layers.fused_moe.fused_moe import get_config_file_name

    tiles = {"BLOCK_SIZE_M": 16, "BLOCK_SIZE_N": 32, "BLOCK_SIZE_K": 32, "GROUP_SIZE_M": 1}
    tiles |= {"SPLIT_K": 1, "num_warps": 4, "num_stages": 2}
    folder.mkdir(exist_ok=True)
    for experts in (NUM_EXPERTS, NUM_EXPERTS + REDUNDANT_EXPERTS):
        name = get_config_file_name(experts // WORLD_SIZE, INTERMEDIATE_SIZE, "float32")
        (folder / name).write_text(json.dumps({"1": tiles}))
    os.environ["VLLM_TUNED_CONFIG_FOLDER"] = str(folder)


def generate(llm: Any, args: argparse.Namespace, round_: int) -> list[Any]:
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=args.max_tokens)
    inputs = [{"prompt_token_ids": tokens} for tokens in prompts(args.rank, round_, args.requests)]
    return llm.generate(inputs, sampling, use_tqdm=False)


def run_rank(spec: dict[str, Any]) -> None:
    """Run one rank in its own process."""
    args = argparse.Namespace(**spec | {"out": Path(spec["out"])})
    faulthandler.dump_traceback_later(60 * args.minutes, exit=True)
    from vllm import LLM

    choose_tiles(args.out / f"tiles-{args.mode}-{args.rank}")
    llm = LLM(str(args.checkpoint), **engine_options(args))
    found: dict[str, Any] = {}
    if args.mode == "on":
        if args.device == "cpu":
            stand_in = (eplb_config(args), NUM_EXPERTS, STAND_IN_LAYERS)
            llm.collective_rpc("stand_in_eplb", args=stand_in)
        llm.collective_rpc("watch_eplb")

    tokens, rows = [], []
    for round_ in range(args.rounds):
        for output in generate(llm, args, round_):
            tokens.append(output.outputs[0].token_ids)
            rows.append(output.outputs[0].routed_experts)
    np.savez(
        args.out / f"{args.mode}-{args.rank}.npz",
        tokens=np.array(tokens),
        prompt_lens=np.array([len(row) + 1 - args.max_tokens for row in rows]),
        rows=np.concatenate(rows),
    )
    if args.mode == "on":
        found |= llm.collective_rpc("eplb_found")[0]
        if args.rank == 0:
            llm.collective_rpc("kill_eplb_thread")
        try:
            generate(llm, args, args.rounds)
            found["error"] = None
        except Exception as error:
            found["error"] = str(error)
            found["traceback"] = traceback.format_exc()
        found["worker_alive"] = llm.collective_rpc("eplb_found")[0]["worker_alive"]
        llm.llm_engine.engine_core.shutdown()
    (args.out / f"{args.mode}-{args.rank}.json").write_text(json.dumps(found, indent=1))
    # Groups of a failed rank cannot be shut down in order.
    hosts.meet(args.out, f"{args.mode}-done", args.rank, WORLD_SIZE)
    sys.stdout.flush()
    os._exit(0)


def run_mode(mode: str, args: argparse.Namespace, deadline: float) -> list[dict[str, Any] | None]:
    """What each rank found; None for one that wrote nothing."""
    files = [args.out / f"{mode}-{rank}.json" for rank in range(WORLD_SIZE)]
    environment = dict(ENVIRONMENT)
    if args.device == "cpu":
        environment["VLLM_CPU_OMP_THREADS_BIND"] = f"0|{1 % (os.cpu_count() or 1)}"
    elif not args.eager:
        environment["TORCH_COMPILE_DISABLE"] = "0"
    left = max(0.2, (deadline - time.monotonic()) / 60)
    common = {**vars(args), "mode": mode, "minutes": left}
    specs = [{**common, "rank": rank} for rank in range(WORLD_SIZE)]
    with hosts.ranks("gpu.eplb", specs, args.out, environment, free_port(), mode) as ranks:
        if why := hosts.wait(ranks, args.out, deadline - time.monotonic(), name=f"{mode}-done"):
            print(why)
            for number, rank in enumerate(ranks):
                print(f"--- {mode}-{number}, status {rank.poll()}: {rank.first_error()}")
                print(rank.tail(60), flush=True)
    return [json.loads(file.read_text()) if file.exists() else None for file in files]


def compare(args: argparse.Namespace, rank: int) -> dict[str, Any]:
    """Compare sequences without and with EPLB, and the rows of sequences that are equal."""
    off, on = (np.load(args.out / f"{mode}-{rank}.npz") for mode in ("off", "on"))
    same_prompts = np.array_equal(off["prompt_lens"], on["prompt_lens"])
    equal = (off["tokens"] == on["tokens"]).all(axis=1)
    compared = np.repeat(equal, off["prompt_lens"] + args.max_tokens - 1)
    rows = [np.sort(data["rows"][compared], -1) for data in (off, on)]
    return {
        "same_prompts": bool(same_prompts),
        "sequences": len(equal),
        "equal_sequences": float(equal.mean()),
        "rows": int(rows[0].shape[0] * rows[0].shape[1]),
        "equal_rows": float((rows[0] == rows[1]).all(-1).mean()) if rows[0].size else 0.0,
        "largest_id": int(on["rows"].max()),
    }


def judge(on: list[dict[str, Any]], compared: list[dict[str, Any]]) -> Any:
    """The conditions, by name, and whether each holds."""
    verdict = {
        "outputs equal": all(c["equal_sequences"] >= LEAST_EQUAL_SEQUENCES for c in compared),
        "rows equal": all(
            c["same_prompts"] and c["equal_rows"] >= LEAST_EQUAL_ROWS for c in compared
        ),
        "ids are logical": all(c["largest_id"] < NUM_EXPERTS for c in compared),
    }
    rebalances = [rank["moved_layers"] / rank["layers"] for rank in on]
    message = "The async EPLB worker of EP rank 0 has failed"
    return verdict | {
        "several rebalances": min(rebalances) >= LEAST_REBALANCES and on[0]["moved_experts"] > 0,
        "ranks agree": on[0]["map"] == on[1]["map"] and len(set(rebalances)) == 1,
        "no error before": all(rank["worker_error"] == "None" for rank in on),
        "error on every rank": all(
            message in (rank["error"] or "") and "SystemExit" in rank["error"] for rank in on
        ),
        "workers ended": not any(rank["worker_alive"] for rank in on),
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=3.8)
    parser.add_argument(
        "--device", choices=["cuda", "cpu"], default="cuda", help="cpu: a rehearsal"
    )
    parser.add_argument("--requests", type=int, default=32, help="of a rank and round, at once")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--step-interval", type=int, default=16, help="steps between rebalances")
    parser.add_argument(
        "--eager", action="store_true", help="neither torch.compile nor CUDA graphs"
    )
    args = parser.parse_args()
    deadline = time.monotonic() + 60 * args.minutes
    args.out = args.out.resolve()
    args.out.mkdir(parents=True, exist_ok=True)
    for stale in args.out.glob("o*-*"):
        stale.unlink()
    args.checkpoint = make_checkpoint(
        args.out / "checkpoint",
        hidden_size=256,
        head_dim=64,
        num_experts=NUM_EXPERTS,
        num_experts_per_tok=8,
        moe_intermediate_size=INTERMEDIATE_SIZE,
    )
    result: dict[str, Any] = {}
    for mode in ("off", "on"):
        result[mode] = run_mode(mode, args, deadline)
        if None in result[mode]:
            break
    else:
        result["compared"] = [compare(args, rank) for rank in range(WORLD_SIZE)]
        result["verdict"] = judge(result["on"], result["compared"])
    result["good"] = all(result.get("verdict", {"ran": False}).values())
    (args.out / "result.json").write_text(json.dumps(result, indent=1))
    print(json.dumps({k: result.get(k) for k in ("compared", "verdict", "good")}, indent=1))
    return 0 if result["good"] else 1


if __name__ == "__main__":
    if sys.argv[1:] and sys.argv[1].endswith(".json"):
        # A rank, which gets its spec alone.
        hosts.run(run_rank)
    sys.exit(main())
