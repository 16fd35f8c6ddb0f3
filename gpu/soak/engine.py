# SPDX-License-Identifier: Apache-2.0
"""One engine of the soak, in a process of its own.

python -m gpu.soak.engine SPEC.json
"""

from __future__ import annotations

import collections
import json
import statistics
import threading
import time
from pathlib import Path
from typing import Any

from benchmarks.common import family, mebibytes
from harness import hosts

UNFINISHED = 96
WAVE = 64
WAVES = 5
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
        # Whether those that are added get rows, with `--flag opt-in`.
        self.asks = True

    def add(self, prompt_len: int, output_len: int) -> None:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        name = str(self.number)
        self.number += 1
        prompt = self.rng.integers(10, self.spec["vocabulary"], prompt_len).tolist()
        opt_in = self.spec["flag"] == "opt-in"
        sampling = SamplingParams(
            temperature=0.0,
            ignore_eos=True,
            max_tokens=output_len,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
            **({"return_routed_experts": self.asks} if opt_in else {}),
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
            self.bad += self.spec["flag"] != "off" and rows != (wanted if self.asks else 0)

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


def go_on(scratch: Path, number: int, spec: dict[str, Any], wants: bool) -> bool:
    """What the first rank wants."""
    if spec["rank"] == 0 and wants:
        (scratch / f"go{number}").touch()
    meet(scratch, f"asked{number}", spec)
    return (scratch / f"go{number}").exists()


def run_engine(spec: dict[str, Any]) -> None:
    import numpy as np
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

    def run_for(seconds: float, name: str) -> None:
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
        (scratch / f"summary-{rank}.json").write_text(json.dumps(summary))

    def run_turn(number: int, asks: bool) -> tuple[float, float]:
        """The same requests for each turn of a number; returns how long they took, and the median
        step, in seconds."""
        load.rng = np.random.default_rng([rank, number])
        load.asks = asks
        # How fast requests come in would decide which of them share the first steps.
        llm.sleep(level=0)
        for _ in range(UNFINISHED):
            load.add(512, 128)
        meet(scratch, f"turn{number}-{asks}", spec)
        load.begin()
        began = load.last_step
        llm.wake_up(tags=["scheduling"])
        load.drain()
        return load.last_step - began, statistics.median(load.gaps)

    def run_turns(seconds: float) -> None:
        """Pairs of turns, of which nobody asks in one and everybody in the other."""
        times: dict[str, list[float]] = collections.defaultdict(list)
        deadline = time.monotonic() + seconds
        number = 0
        # The first rank decides, so that all ranks run as many.
        while go_on(scratch, number, spec, time.monotonic() < deadline):
            for asks in (False, True) if number % 2 else (True, False):
                took, step = run_turn(number, asks)
                if number > 0:  # The first one warms up.
                    name = "all" if asks else "silent"
                    times[f"{name}_s"].append(round(took, 4))
                    times[f"{name}_step_ms"].append(round(1e3 * step, 4))
            summary["turns"] = times
            (scratch / f"summary-{rank}.json").write_text(json.dumps(summary))
            number += 1
        load.asks = True

    if spec["flag"] == "opt-in":
        run_turns(spec["seconds"])
    else:
        # Kernels are compiled in the first steps with a new number of tokens.
        run_for(WARM_UP * spec["seconds"], "warm_up")
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
