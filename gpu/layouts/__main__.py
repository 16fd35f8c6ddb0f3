# SPDX-License-Identifier: Apache-2.0
"""Check that every parallel layout returns the same rows: one cell per layout, on 1 to 8 GPUs.

    python -m gpu.layouts --gpus 2 --out DIR [--only tp2,dp2ep2] [--minutes 8]

A cell starts the engines of a layout with a small random model, sends prompts of which two in three
ask for rows (half of them as streams, where a server answers), and compares every row with two
oracles:

- the top-k of the router logits that the ranks recorded before dispatch;
- the rows of one GPU for the same prompts, as long as the generated tokens are equal. Rounding may
  change a close decision, and with it later layers and positions. Each first difference must have a
  margin (k-th minus (k+1)-th logit on one GPU) below `MARGIN`. Logits range over more than +-10.

A finished cell is one line of `cells.jsonl`; a second run skips cells that passed. Cells that the
host cannot run (too few GPUs, no Ray, no time left) are "unverified". `layouts.md` is the table of
all cells, `logs.txt` the end of the logs of failed ones. Cells share the GPUs because their models
are small. The exit status is the number of failed cells.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import tempfile
import threading
import time
import traceback
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.common import table
from examples.client import Completion
from gpu.layouts.answers import (
    MARGIN,
    Failed,
    Logits,
    check_answers,
    check_own_logits,
    check_reference,
    gather_logits,
    read_answers,
)
from gpu.layouts.cells import CELLS, QWEN3, Cell, make_model
from gpu.layouts.running import Refused, device_environment, run_cell

CELL_S = 180.0  # the most that a cell may take


class Run:
    def __init__(self, arguments: argparse.Namespace, work: Path) -> None:
        self.arguments = arguments
        self.out: Path = arguments.out
        self.work = work
        self.deadline = time.monotonic() + 60 * arguments.minutes
        self.lock = threading.Lock()
        self.out.mkdir(parents=True, exist_ok=True)
        self.record = self.out / "cells.jsonl"
        self.references: dict[str, tuple[dict[int, Completion], Logits]] = {}

    def results(self) -> dict[str, dict[str, Any]]:
        text = self.record.read_text() if self.record.exists() else ""
        lines = [json.loads(line) for line in text.splitlines()]
        return {line["cell"]: line for line in lines}

    def run(self, name: str, slot: int, dtype: str) -> dict[str, Any]:
        cell = CELLS[name]
        began = time.monotonic()
        result: dict[str, Any] = {"cell": name, "gpus": cell.gpus, "note": cell.note}
        scratch = self.work / name
        scratch.mkdir()
        try:
            check_host(name, cell, self.arguments.device)
            limit_s = min(CELL_S, self.deadline - time.monotonic())
            if limit_s < 30:
                raise TimeoutError("no minutes left")
            environment = device_environment(
                self.arguments.device, cell.gpus, slot, self.arguments.gpus
            )
            run_cell(cell, dtype, self.work / "models", scratch, environment, limit_s)
            result["seconds"] = round(time.monotonic() - began, 1)
            result |= self.check(name, cell, dtype, scratch)
            result["result"] = "ok"
        except Refused as e:
            result["result"] = f"refused: {e}"
        except (ImportError, TimeoutError) as e:
            result["result"] = f"unverified: {e}"
        except Exception as e:
            kind = "" if isinstance(e, Failed) else f"{type(e).__name__}: "
            result["result"] = f"FAILED: {kind}{e}"[:600]
            self.keep_logs(name, scratch, "" if isinstance(e, Failed) else traceback.format_exc())
        result.setdefault("seconds", round(time.monotonic() - began, 1))
        with self.lock:
            with self.record.open("a") as f:
                f.write(json.dumps(result) + "\n")
            (self.out / "layouts.md").write_text(self.table())
        print(f"{name}: {result['result']} ({result['seconds']} s)", flush=True)
        return result

    def check(self, name: str, cell: Cell, dtype: str, scratch: Path) -> dict[str, Any]:
        answers = read_answers(scratch)
        num_layers = 4 if cell.model == "gptoss" else QWEN3["num_hidden_layers"]
        result: dict[str, Any] = {"dtype": cell.dtype or dtype}
        if cell.model == "gptoss":
            result["dtype"] = "mxfp4"
        result["rows"] = check_answers(answers, num_layers, cell.tokens)
        logits: Logits = {}
        if cell.records:
            logits, moved = gather_logits(scratch)
            result["decisions"] = check_own_logits(answers, logits)
            if "enable_eplb" in cell.options:
                result["experts_moved"] = moved
                if not moved:
                    raise Failed("EPLB moved no expert: the cell shows nothing")
        if name == "one" or (name == "one-bf16" and dtype == "bfloat16"):
            self.references[dtype] = (answers, logits)
        elif cell.model == "qwen3" and not cell.dtype and "float32" in self.references:
            result |= check_reference(answers, *self.references[dtype])
        return result

    def keep_logs(self, name: str, scratch: Path, why: str) -> None:
        with self.lock, (self.out / "logs.txt").open("a") as f:
            f.write(f"\n===== {name}\n{why}")
            for log in sorted(scratch.glob("*.log")):
                text = log.read_text(errors="replace")
                f.write(f"\n--- {log.name}\n{text[:1000]}\n[...]\n{text[-12000:]}\n")

    def all(self) -> int:
        arguments = self.arguments
        names = arguments.only or [n for n, c in CELLS.items() if arguments.gpus in c.hosts]
        done = {n for n, r in self.results().items() if r["result"] == "ok"}
        for model in {CELLS[n].model for n in names} | {"qwen3"}:
            make_model(model, self.work / "models")
        dtype = "float32"
        # The reference runs each time: its rows are not in the record.
        first = ["one", *(n for n in names if n == "one-bf16" and n not in done)]
        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            tried = list(pool.map(lambda p: self.run(p[1], p[0], dtype), enumerate(first)))
        if tried[0]["result"] != "ok":
            print("no float32 of one GPU: bfloat16, and no comparison with it", flush=True)
            dtype = "bfloat16"
        rest = [n for n in names if n not in ("one", "one-bf16") and n not in done]
        with concurrent.futures.ThreadPoolExecutor(arguments.together) as pool:
            list(pool.map(lambda p: self.run(p[1], p[0], dtype), enumerate(rest)))
        print(self.table())
        results = self.results()
        return sum(r["result"].startswith("FAILED") for r in results.values())

    def table(self) -> str:
        lines = []
        for name, r in self.results().items():
            against = "-"
            if "against_one" in r:
                against = f"{r['differ']} of {r['against_one']}"
                if r["differ"]:
                    against += f" ({r['first_differ']} first, margin <= {r['greatest_margin']:.2g})"
            dtype = f", {r['dtype']}" if "dtype" in r else ""
            moved = ", experts moved" if r.get("experts_moved") else ""
            layout = f"{r['note']}{dtype}{moved}"
            rows, decisions = r.get("rows", "-"), r.get("decisions", "-")
            result = r["result"]
            lines.append([name, layout, r["gpus"], result, rows, decisions, against, r["seconds"]])
        head = "Cell | Layout | GPUs | Result | Rows | Decisions, own logits | Differ from one GPU"
        return table(f"{head} | s", lines) + f"\nStated margin: {MARGIN}.\n"


def check_host(name: str, cell: Cell, device: str) -> None:
    """Raise ImportError if this host cannot run the cell."""
    import torch

    if device == "cuda" and (count := torch.cuda.device_count()) < cell.gpus:
        raise ImportError(f"needs {cell.gpus} GPUs, this host has {count}")
    if name.startswith("ray") and find_spec("ray") is None:
        raise ImportError("no Ray on the host")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gpus", type=int, choices=[1, 2, 4, 8], default=2)
    parser.add_argument("--out", type=Path, default=Path("build/layouts"))
    parser.add_argument("--only", type=lambda s: s.split(","), help="cells, comma-separated")
    parser.add_argument("--minutes", type=float, default=8.0, help="no cell runs after that")
    parser.add_argument("--together", type=int, default=3, help="cells at a time")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    arguments = parser.parse_args()
    if unknown := set(arguments.only or []) - set(CELLS):
        parser.error(f"unknown cells {sorted(unknown)}: of {', '.join(CELLS)}")
    with tempfile.TemporaryDirectory(prefix="layouts-") as work:
        return Run(arguments, Path(work)).all()


if __name__ == "__main__":
    raise SystemExit(main())
