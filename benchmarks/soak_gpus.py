# SPDX-License-Identifier: Apache-2.0
"""A soak on several GPUs, data and expert parallel: does anything stall, slow down or grow?

    python benchmarks/soak_gpus.py run --build-label pristine --model qwen3 --minutes 5 --out DIR
    python benchmarks/soak_gpus.py run --build-label patched --model qwen3 --minutes 5 --out DIR
    python benchmarks/soak_gpus.py run --build-label patched --gpus 4 --tp 2 --minutes 5 --out DIR
    python benchmarks/soak_gpus.py plot DIR/*.json --out DIR/soak.png

`run` starts offline engines (two, DP2 + EP2, joined by VLLM_DP_*; with `--gpus 4 --tp 2` each has
two GPUs, and the MoE layers are sequence parallel) with dummy weights and the flag on, so that
every request gets rows, and keeps 96 unfinished requests in each: 16 to 1,024 tokens in, 16 to 256
out. Every second it records, for each engine, finished requests, output tokens, steps, the longest
gap between two steps, and the memory of its processes and its GPUs. Then the faults: 64 requests
that finish in one step, five times; and, where the build can, every copy of rows to the host 20 ms
late. The record is written anew every few seconds: a killed run keeps what it has.
It runs with the pristine release too (`--flag off` for either without the feature).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(ROOT), str(HERE)]

from benchmarks.hosts import data_parallel, environment  # noqa: E402
from benchmarks.models import QWEN3_30B_A3B  # noqa: E402
from examples.demo.server import Kept  # noqa: E402
from examples.shapes import GPT_OSS  # noqa: E402

UNFINISHED = 96
WAVE = 64
WAVES = 5
DELAY_MS = 20.0
FAULT_SECONDS = 15.0
# How long an engine may take from its start to its first step.
START_SECONDS = 240.0

# For a rehearsal without a GPU.
TINY = {
    "head_dim": 64,
    "hidden_size": 256,
    "moe_intermediate_size": 64,
    "num_attention_heads": 4,
    "vocab_size": 1024,
}


def shape(model: str, layers: int) -> dict[str, Any]:
    if model != "gptoss":
        small = TINY if model == "tiny" else {}
        return {**QWEN3_30B_A3B, **small, "num_hidden_layers": layers}
    kinds = ["sliding_attention", "full_attention"] * layers
    return {**GPT_OSS, "num_hidden_layers": layers, "layer_types": kinds[:layers]}


def layout(gpus: int, tp: int) -> str:
    names = [f"{kind}{size}" for kind, size in (("TP", tp), ("DP", gpus // tp)) if size > 1]
    return "x".join(names) + (f"+EP{gpus}" if gpus > 1 else "one")


# --- one engine -----------------------------------------------------------------------------------


class Load:
    """Requests and what became of them; one thread steps, another records."""

    def __init__(self, spec: dict[str, Any], llm: Any) -> None:
        import numpy as np

        self.spec = spec
        self.engine = llm.llm_engine
        self.rng = np.random.default_rng(spec["rank"])
        self.number = 0
        self.last_step = time.monotonic()
        self.gap = 0.0
        self.gaps: list[float] = []
        self.finished = self.tokens = self.steps = self.rows = self.bad = 0
        self.wanted: dict[str, int] = {}

    def add(self, prompt_len: int, output_len: int) -> None:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        name = str(self.number)
        self.number += 1
        self.engine.add_request(
            name,
            {
                "prompt_token_ids": self.rng.integers(
                    10, self.spec["vocabulary"], prompt_len
                ).tolist()
            },
            SamplingParams(
                temperature=0.0,
                ignore_eos=True,
                max_tokens=output_len,
                detokenize=False,
                output_kind=RequestOutputKind.FINAL_ONLY,
            ),
        )
        self.wanted[name] = prompt_len + output_len - 1

    def add_random(self) -> None:
        self.add(int(self.rng.integers(16, 1025)), int(self.rng.integers(16, 257)))

    def step(self) -> None:
        outputs = self.engine.step()
        now = time.monotonic()
        gap = now - self.last_step
        self.gap = max(self.gap, gap)
        self.gaps.append(gap)
        self.last_step = now
        self.steps += 1
        for output in outputs:
            if not output.finished:
                continue
            completion = output.outputs[0]
            self.finished += 1
            self.tokens += len(completion.token_ids)
            wanted = self.wanted.pop(output.request_id)
            rows = completion.routed_experts
            if rows is not None:
                self.rows += len(rows)
            if self.spec["flag"] == "on" and (rows is None or len(rows) != wanted):
                self.bad += 1

    def drain(self) -> None:
        while self.wanted:
            self.step()

    def begin(self) -> None:
        """A pause in which nothing was asked for is no gap."""
        self.last_step = time.monotonic()
        self.gap = 0.0
        self.gaps.clear()


def record_seconds(load: Load, stop: threading.Event, file: Path, phase: list[str]) -> None:
    import psutil

    try:
        import pynvml

        pynvml.nvmlInit()
        gpus = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in load.spec["devices"]]
    except Exception:
        gpus = []
    me = psutil.Process()
    began = time.monotonic()
    before = (0, 0, 0)
    with file.open("w") as out:
        while not stop.wait(1.0):
            counts = (load.finished, load.tokens, load.steps)
            # The pin's shared memory counts for each process that maps it; unique memory would
            # not, but takes much longer to read.
            rss = 0
            for process in (me, *me.children(recursive=True)):
                with contextlib.suppress(psutil.Error):
                    rss += process.memory_info().rss
            gap, load.gap = load.gap, 0.0
            if load.wanted:
                gap = max(gap, time.monotonic() - load.last_step)
            line = {
                "phase": phase[0],
                "t": round(time.monotonic() - began, 2),
                "finished": counts[0] - before[0],
                "tokens": counts[1] - before[1],
                "steps": counts[2] - before[2],
                "longest_gap_s": round(gap, 4),
                "rss_mb": rss >> 20,
                "gpu_mb": sum(pynvml.nvmlDeviceGetMemoryInfo(g).used >> 20 for g in gpus) or None,
            }
            before = counts
            out.write(json.dumps(line) + "\n")
            out.flush()


def meet(scratch: Path, name: str, spec: dict[str, Any]) -> None:
    """Wait until every rank is here."""
    (scratch / f"{name}-{spec['rank']}").touch()
    while len(list(scratch.glob(f"{name}-*"))) < spec["ranks"]:
        time.sleep(0.02)


def run_engine(spec: dict[str, Any]) -> None:
    from vllm import LLM

    scratch, rank = Path(spec["scratch"]), spec["rank"]
    llm = LLM(spec["model"], **spec["options"])
    load = Load(spec, llm)
    for _ in range(8):
        load.add(64, 8)
    load.drain()
    meet(scratch, "ready", spec)
    load.begin()
    stop, phase = threading.Event(), ["load"]
    recorder = threading.Thread(
        target=record_seconds, args=(load, stop, scratch / f"seconds-{rank}.jsonl", phase)
    )
    recorder.start()
    summary: dict[str, Any] = {}

    def run_for(seconds: float, name: str) -> None:
        while len(load.wanted) < UNFINISHED:
            load.add_random()
        load.begin()
        counts = (load.finished, load.tokens, load.steps)
        began = time.monotonic()
        while time.monotonic() - began < seconds:
            while len(load.wanted) < UNFINISHED:
                load.add_random()
            load.step()
        took = time.monotonic() - began
        gaps = sorted(load.gaps)
        summary[name] = {
            "seconds": round(took, 2),
            "requests_per_s": round((load.finished - counts[0]) / took, 3),
            "tokens_per_s": round((load.tokens - counts[1]) / took, 1),
            "steps": load.steps - counts[2],
            "longest_gap_s": round(gaps[-1], 4),
            "median_gap_s": round(statistics.median(gaps), 5),
            "p999_gap_s": round(gaps[int(0.999 * (len(gaps) - 1))], 4),
        }
        (scratch / f"summary-{rank}.json").write_text(json.dumps(summary))

    run_for(spec["seconds"], "load")
    phase[0] = "drain"
    load.drain()
    meet(scratch, "drained", spec)
    phase[0] = "waves"
    waves = []
    for number in range(WAVES):
        began = time.monotonic()
        for _ in range(WAVE):
            load.add(256, 64)
        load.begin()
        load.drain()
        waves.append(
            {
                "seconds": round(time.monotonic() - began, 4),
                "longest_gap_s": round(max(load.gaps), 4),
                "last_gap_s": round(load.gaps[-1], 4),
            }
        )
        meet(scratch, f"wave{number}", spec)
    summary["waves"] = waves
    if spec["flag"] == "on" and all(llm.collective_rpc("delay_copies", args=(DELAY_MS,))):
        meet(scratch, "delayed", spec)
        phase[0] = "late copies"
        run_for(FAULT_SECONDS, "late_copies")
        load.drain()
        llm.collective_rpc("delay_copies", args=(0.0,))
    stop.set()
    recorder.join()
    summary["rows"] = load.rows
    summary["finished"] = load.finished
    summary["without_all_rows"] = load.bad
    (scratch / f"summary-{rank}.json").write_text(json.dumps(summary))
    meet(scratch, "done", spec)
    # Don't wait long for the engine's end: the keeper ends what is left.
    shutdown = threading.Thread(target=llm.llm_engine.engine_core.shutdown, daemon=True)
    shutdown.start()
    shutdown.join(10)
    os._exit(0)


# --- the run --------------------------------------------------------------------------------------


def run(arguments: argparse.Namespace) -> int:
    count = arguments.gpus // arguments.tp
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        scratch = Path(folder)
        config = shape(arguments.model, arguments.layers)
        (scratch / "model").mkdir()
        (scratch / "model" / "config.json").write_text(json.dumps(config))
        options: dict[str, Any] = {
            "load_format": "dummy",
            "skip_tokenizer_init": True,
            "max_model_len": 2048,
            "max_num_batched_tokens": 4096,
            "max_num_seqs": 128,
            "enable_prefix_caching": False,
            # Plenty for the load; the pin's shared memory grows with it.
            "kv_cache_memory_bytes": 8 << 30,
            "gpu_memory_utilization": 0.5,
            "tensor_parallel_size": arguments.tp,
            "enable_expert_parallel": arguments.gpus > 1,
            "enable_return_routed_experts": arguments.flag == "on",
            "worker_extension_cls": "soak_worker.Faults",
            "compilation_config": {"cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32, 64, 96, 128]},
            "seed": 0,
        }
        if arguments.eager:
            options |= {"enforce_eager": True, "compilation_config": {}}
        if arguments.model == "tiny":
            options["kv_cache_memory_bytes"] = 1 << 30
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
            **environment(HERE),
            # The demo's processes go without: they run eagerly.
            "TORCH_COMPILE_DISABLE": "0",
            "VLLM_CACHE_ROOT": f"{tempfile.gettempdir()}/vllm-cache-{arguments.build_label}",
        }
        limit_s = START_SECONDS + 60 * arguments.minutes + 60 + 2 * FAULT_SECONDS
        if arguments.limit_minutes:
            limit_s = 60 * arguments.limit_minutes
        began = time.monotonic()
        with contextlib.ExitStack() as stack:
            engines = []
            for rank in range(count):
                spec = {
                    "model": str(scratch / "model"),
                    "options": options,
                    "rank": rank,
                    "ranks": count,
                    "devices": list(range(rank * arguments.tp, (rank + 1) * arguments.tp)),
                    "scratch": folder,
                    "seconds": 60 * arguments.minutes,
                    "vocabulary": config["vocab_size"],
                    "flag": arguments.flag,
                }
                (scratch / f"spec-{rank}.json").write_text(json.dumps(spec))
                parallel = data_parallel(rank, count, arguments.port)
                command = [sys.executable, __file__, "engine", str(scratch / f"spec-{rank}.json")]
                log = scratch / f"engine-{rank}.log"
                engines.append(stack.enter_context(Kept(command, log, variables | parallel)))
            end = ""
            while not end:
                time.sleep(2.0)
                if len(list(scratch.glob("done-*"))) == count:
                    end = "finished"
                elif any(e.poll() is not None for e in engines):
                    end = "an engine ended: " + next(
                        e.first_error() or e.last_line() for e in engines if e.poll() is not None
                    )
                elif time.monotonic() - began > limit_s:
                    end = f"ended after {limit_s:.0f} s, the limit: {engines[0].last_line()}"
                record["end"] = end or "running"
                collect(record, scratch, count)
                if end and end != "finished":
                    record["logs"] = [engine.tail(80) for engine in engines]
                (arguments.out / f"{name}.json").write_text(json.dumps(record) + "\n")
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


# --- the plot -------------------------------------------------------------------------------------


def plot(files: list[Path], out: Path) -> int:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    records = [json.loads(file.read_text()) for file in files]
    models = sorted({r["model"] for r in records})
    figure, axes = plt.subplots(
        3, len(models), figsize=(6.5 * len(models), 8), squeeze=False, sharex="col"
    )
    labels = sorted({f"{r['build']}, flag {r['flag']}" for r in records})
    for column, model in enumerate(models):
        top, middle, bottom = axes[:, column]
        top.set_title(model, fontsize=10)
        for record in (r for r in records if r["model"] == model):
            label = f"{record['build']}, flag {record['flag']}"
            color = f"C{labels.index(label)}"
            ranks = [
                [s for s in rank["seconds"] if s["phase"] == "load"] for rank in record["ranks"]
            ]
            count = min(map(len, ranks), default=0)
            if not count:
                continue
            t = [s["t"] for s in ranks[0][:count]]
            finished = [sum(rank[i]["finished"] for rank in ranks) for i in range(count)]
            # A request takes seconds: a mean over ten tells more than the bare counts.
            mean = [statistics.fmean(finished[max(0, i - 4) : i + 6]) for i in range(len(finished))]
            gaps = [1e3 * max(rank[i]["longest_gap_s"] for rank in ranks) for i in range(count)]
            memory = [sum(rank[i]["rss_mb"] for rank in ranks) / 1024 for i in range(count)]
            top.plot(t, mean, color=color, label=label)
            middle.plot(t, gaps, color=color, linewidth=0.8)
            bottom.plot(t, memory, color=color)
        top.set_ylabel("requests/s, mean of 10 s")
        top.set_ylim(bottom=0)
        top.legend(fontsize=8)
        middle.set_ylabel("longest gap between steps, ms")
        middle.set_yscale("log")
        bottom.set_ylabel("host memory, GiB")
        bottom.set_ylim(bottom=0)
        bottom.set_xlabel("s")
        for axis in (top, middle, bottom):
            axis.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(out, dpi=110)
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    verbs = parser.add_subparsers(dest="verb", required=True)
    runs = verbs.add_parser("run", help="one build, one model")
    runs.add_argument("--build-label", required=True, help="for the record, e.g. pristine")
    runs.add_argument("--flag", choices=["on", "off"], default="on")
    runs.add_argument("--model", choices=["qwen3", "gptoss", "tiny"], default="qwen3")
    runs.add_argument("--gpus", type=int, default=2)
    runs.add_argument("--tp", type=int, default=1, help="GPUs of each engine")
    runs.add_argument("--layers", type=int, default=12)
    runs.add_argument("--minutes", type=float, default=5.0, help="of load, faults come on top")
    runs.add_argument("--limit-minutes", type=float, help="of everything; what is there is kept")
    runs.add_argument("--out", type=Path, required=True, help="folder for the record")
    runs.add_argument("--port", type=int, default=29650, help="the first of some free ones")
    runs.add_argument("--eager", action="store_true", help="no CUDA graphs: starts sooner")
    plots = verbs.add_parser("plot", help="a picture of records")
    plots.add_argument("files", type=Path, nargs="+")
    plots.add_argument("--out", type=Path, required=True)
    engines = verbs.add_parser("engine", help="used by `run`")
    engines.add_argument("spec", type=Path)
    arguments = parser.parse_args()
    if arguments.verb == "engine":
        run_engine(json.loads(arguments.spec.read_text()))
        return 0
    if arguments.verb == "plot":
        return plot(arguments.files, arguments.out)
    if arguments.gpus % arguments.tp:
        parser.error(f"{arguments.gpus} GPUs are not engines of {arguments.tp} each")
    return run(arguments)


if __name__ == "__main__":
    raise SystemExit(main())
