# SPDX-License-Identifier: Apache-2.0
"""One engine of the soak, in a process of its own.

python -m gpu.soak.engine SPEC.json
"""

from __future__ import annotations

import json
import statistics
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.common import family, mebibytes
from harness import hosts

UNFINISHED = 96
DELAY_MS = 20.0
FAULT_SECONDS = 15.0
# Time of the warm-up, relative to the load's.
WARM_UP = 0.25


class Load:
    """The requests and their results; one thread steps the engine, another records."""

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
        prompt = self.rng.integers(10, self.spec["vocabulary"], prompt_len).tolist()
        sampling = SamplingParams(
            temperature=0.0,
            ignore_eos=True,
            max_tokens=output_len,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        self.engine.add_request(name, {"prompt_token_ids": prompt}, sampling)
        self.wanted[name] = prompt_len + output_len - 1

    def fill(self) -> None:
        while len(self.wanted) < UNFINISHED:
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
            rows = 0 if completion.routed_experts is None else len(completion.routed_experts)
            self.rows += rows
            self.bad += self.spec["flag"] != "off" and rows != wanted

    def drain(self) -> None:
        while self.wanted:
            self.step()

    def begin(self) -> None:
        """Start measuring gaps now: a pause without requests does not count."""
        self.last_step = time.monotonic()
        self.gap = 0.0
        self.gaps.clear()


def record_seconds(load: Load, stop: threading.Event, file: Path, phase: list[str]) -> None:
    try:
        import pynvml

        pynvml.nvmlInit()
        gpus = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in load.spec["devices"]]
    except Exception:
        gpus = []
    began = time.monotonic()
    before = (0, 0, 0)
    with file.open("w") as out:
        while not stop.wait(1.0):
            counts = (load.finished, load.tokens, load.steps)
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
                # Shared memory of the pinned release counts once per process that maps it. Unique
                # memory would not, but takes much longer to read.
                "rss_mb": mebibytes(family()),
                "gpu_mb": sum(pynvml.nvmlDeviceGetMemoryInfo(g).used >> 20 for g in gpus) or None,
            }
            before = counts
            out.write(json.dumps(line) + "\n")
            out.flush()


def meet(scratch: Path, name: str, spec: dict[str, Any]) -> None:
    hosts.meet(scratch, name, spec["rank"], spec["ranks"])


def measure(load: Load, summary: dict[str, Any], file: Path, seconds: float, name: str) -> None:
    """Keep the engine busy for some seconds, and put what it did into the summary."""
    load.fill()
    load.begin()
    counts = (load.finished, load.tokens, load.steps)
    began = time.monotonic()
    while time.monotonic() - began < seconds:
        load.fill()
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
    file.write_text(json.dumps(summary))


def run_engine(spec: dict[str, Any]) -> None:
    from vllm import LLM

    scratch, rank = Path(spec["scratch"]), spec["rank"]
    llm = LLM(spec["model"], **spec["options"])
    load = Load(spec, llm)
    # The last one is alone: Triton compiles kernels of their own for one token.
    for output_len in range(1, 9):
        load.add(64, output_len)
    load.drain()
    meet(scratch, "ready", spec)
    load.begin()
    stop, phase = threading.Event(), ["load"]
    recorder = threading.Thread(
        target=record_seconds, args=(load, stop, scratch / f"seconds-{rank}.jsonl", phase)
    )
    recorder.start()
    summary: dict[str, Any] = {}

    run_for = partial(measure, load, summary, scratch / f"summary-{rank}.json")
    # Kernels are compiled in the first steps with a new number of tokens.
    run_for(WARM_UP * spec["seconds"], "warm_up")
    run_for(spec["seconds"], "load")
    phase[0] = "drain"
    load.drain()
    meet(scratch, "drained", spec)
    if spec["flag"] != "off" and all(llm.collective_rpc("delay_copies", args=(DELAY_MS,))):
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
    hosts.leave(llm)


if __name__ == "__main__":
    hosts.run(run_engine)
