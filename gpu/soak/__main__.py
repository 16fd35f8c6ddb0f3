# SPDX-License-Identifier: Apache-2.0
"""A soak on several GPUs with data and expert parallelism: does anything stall, slow down or grow?

    python -m gpu.soak run --build-label pristine --model qwen3 --minutes 5 --out DIR
    python -m gpu.soak run --build-label patched --model qwen3 --minutes 5 --out DIR
    python -m gpu.soak run --build-label patched --gpus 4 --tp 2 --minutes 5 --out DIR

`run` starts offline engines with dummy weights and the flag on, so that every request gets rows:
two engines (DP2, EP2), or with `--gpus 4 --tp 2` two engines of two GPUs each, whose MoE layers are
sequence parallel. Each keeps 96 unfinished requests: 16 to 1,024 tokens in, 16 to 256 out. Every
second it records finished requests, output tokens, steps, the longest gap between two steps, and
the memory of processes and GPUs. Then, where the build supports it, every copy of rows to the host
is late by 20 ms. The record is rewritten every few seconds, so that a killed run keeps its data.
`run` also takes the pristine release; `--flag off` runs either build without the feature.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import tempfile
from pathlib import Path
from typing import Any

from gpu.soak.engine import FAULT_SECONDS, UNFINISHED, WARM_UP
from harness import hosts
from harness.process import free_port
from harness.shapes import model_config, write_model

# How long an engine may take from its start to its first step.
START_SECONDS = 240.0
# Tiny: to test the program without a GPU.
SHAPES = {
    "qwen3": "qwen3-30b-a3b",
    "gptoss": "gpt-oss-20b",
    "gptoss-120b": "gpt-oss-120b",
    "tiny": "tiny",
}


def layout(gpus: int, tp: int) -> str:
    names = [f"{kind}{size}" for kind, size in (("TP", tp), ("DP", gpus // tp)) if size > 1]
    return "x".join(names) + (f"+EP{gpus}" if gpus > 1 else "one")


def engine_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """What `vllm.LLM` gets."""
    options: dict[str, Any] = {
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "max_model_len": 2048,
        "max_num_batched_tokens": 4096,
        "max_num_seqs": 128,
        "enable_prefix_caching": False,
        # More than the load needs. The pinned release's shared memory grows with it.
        "kv_cache_memory_bytes": 8 << 30,
        "gpu_memory_utilization": 0.5,
        "tensor_parallel_size": arguments.tp,
        "enable_expert_parallel": arguments.gpus > 1,
        "enable_return_routed_experts": arguments.flag != "off",
        "worker_extension_cls": "gpu.soak.faults.Faults",
        "compilation_config": {
            "cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32, 64, 96, 128, 256, 512]
        },
        "seed": 0,
    }
    if arguments.eager:
        options |= {"enforce_eager": True, "compilation_config": {}}
    if arguments.model == "tiny":
        options["kv_cache_memory_bytes"] = 1 << 30
    return options


def run(arguments: argparse.Namespace) -> int:
    count = arguments.gpus // arguments.tp
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        scratch = Path(folder)
        shape = (SHAPES[arguments.model], arguments.layers)
        options = engine_options(arguments)
        record: dict[str, Any] = {
            "build": arguments.build_label,
            "flag": arguments.flag,
            "model": f"{arguments.model} shape, {arguments.layers} layers, dummy weights",
            "layout": layout(arguments.gpus, arguments.tp),
            "unfinished": UNFINISHED,
            "minutes": arguments.minutes,
            "ranks": [],
        }
        arguments.out.mkdir(parents=True, exist_ok=True)
        name = f"soak-{arguments.model}-{arguments.build_label}-{arguments.flag}"
        variables = {
            **hosts.environment(),
            # Other processes of the harness run without torch.compile.
            "TORCH_COMPILE_DISABLE": "0",
            "VLLM_CACHE_ROOT": f"{tempfile.gettempdir()}/vllm-cache-{arguments.build_label}",
        }
        limit_s = START_SECONDS + 60 * (1 + WARM_UP) * arguments.minutes + 60 + 2 * FAULT_SECONDS
        if arguments.limit_minutes:
            limit_s = 60 * arguments.limit_minutes
        specs = [
            {
                "model": write_model(scratch / "model", *shape),
                "options": options,
                "rank": rank,
                "ranks": count,
                "devices": list(range(rank * arguments.tp, (rank + 1) * arguments.tp)),
                "scratch": folder,
                "seconds": 60 * arguments.minutes,
                "vocabulary": model_config(*shape)["vocab_size"],
                "flag": arguments.flag,
            }
            for rank in range(count)
        ]
        with hosts.ranks("gpu.soak.engine", specs, scratch, variables, free_port()) as engines:
            file = arguments.out / f"{name}.json"

            def look() -> None:
                collect(record, scratch, count)
                file.write_text(json.dumps(record) + "\n")

            record["end"] = "running"
            why = hosts.wait(engines, scratch, limit_s, look=look, every_s=2.0)
            if why:
                record["logs"] = [engine.tail(80) for engine in engines]
            record["end"] = why or "finished"
            look()
    report = {k: v for k, v in record.items() if k not in ("ranks", "logs")}
    print(json.dumps({**report, "summary": [r["summary"] for r in record["ranks"]]}, indent=1))
    if "logs" in record:
        print("\n".join(record["logs"]))
    return int(record["end"] != "finished")


def collect(record: dict[str, Any], scratch: Path, count: int) -> None:
    ranks = []
    for rank in range(count):
        seconds: list[Any] = []
        with contextlib.suppress(OSError, ValueError):
            for line in (scratch / f"seconds-{rank}.jsonl").read_text().splitlines():
                seconds.append(json.loads(line))
        summary = {}
        with contextlib.suppress(OSError, ValueError):
            summary = json.loads((scratch / f"summary-{rank}.json").read_text())
        ranks.append({"summary": summary, "seconds": seconds})
    record["ranks"] = ranks


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    # The commands of the records have it.
    parser.add_argument("run", choices=["run"], help="one build, one model")
    parser.add_argument("--build-label", required=True, help="for the record, e.g. pristine")
    parser.add_argument("--flag", choices=["on", "off"], default="on")
    parser.add_argument("--model", choices=SHAPES, default="qwen3")
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--tp", type=int, default=1, help="GPUs of each engine")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument(
        "--minutes", type=float, default=5.0, help="of load; warm-up and faults come on top"
    )
    parser.add_argument("--limit-minutes", type=float, help="of everything; what is there is kept")
    parser.add_argument("--out", type=Path, required=True, help="folder for the record")
    parser.add_argument("--eager", action="store_true", help="no CUDA graphs: starts sooner")
    arguments = parser.parse_args()
    if arguments.gpus % arguments.tp:
        parser.error(f"{arguments.gpus} GPUs are not engines of {arguments.tp} each")
    return run(arguments)


if __name__ == "__main__":
    raise SystemExit(main())
