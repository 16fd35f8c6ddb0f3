# SPDX-License-Identifier: Apache-2.0
"""Train a random MoE model with TRL on a GPU, without and with route replay.

    python -m gpu.training --out DIR [--seconds N] [--interrupt] [--nccl] [--tiny]
        [--python PYTHON]
    python -m gpu.training --out DIR --draw

It starts a server with CUDA graphs and a prefix cache, in bfloat16, and TRL's `GRPOTrainer`. On one
GPU, the server reloads the weights from shared memory before each rollout. With `--nccl`, the
trainer has the second GPU, and TRL sends the weights itself. The trainer runs without replay, with
replay, and then without rows, which gives the time of a step without them. When a step is over, it
becomes a line of `DIR/training.jsonl`. After N seconds all ends, and the table and the picture are
made of the steps so far. `--draw` makes both again. `--tiny` is for a CPU.

With `--interrupt` (vLLM v0.33.0), it trains in two more ways. In both, new weights interrupt every
third sample, and then resume it. Its tokens keep their experts, or the router chooses them again.

PYTHON has `trl`. It gets this process's PYTHONPATH, without vLLM unless TRL sends the weights.

Exit status: 0 if there are steps without and with replay; 1 if not, or if a process failed.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import time
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from benchmarks.common import table
from demos.train.report import Step
from gpu.training import ARMS, STEPS_FILE
from harness.checkpoint import make_checkpoint
from harness.process import QUIET, Kept
from harness.server import Server, ServerError

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("demos", "examples", "gpu", "harness", "tools")
# Each layer's output has about the size of its input: see `harness.families.COMMON`.
MODEL: dict[str, Any] = {
    "dtype": "bfloat16",
    "num_hidden_layers": 24,
    "hidden_size": 512,
    "head_dim": 64,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 128,
    "initializer_range": 0.044,
    "router_std": 0.044,
}
TINY: dict[str, Any] = {"dtype": "bfloat16", "num_hidden_layers": 2, "router_std": 0.125}
# How long a step of each way takes. Only the ratios matter.
TIMES = {"own": 1.0, "replay": 1.1, "routed": 1.1, "forced": 1.1, "plain": 0.85}
SERVER = [
    "--dtype=bfloat16",
    "--enable-return-routed-experts",
    "--routed-experts-opt-in",
    "--enable-prefix-caching",
    "--logprobs-mode=processed_logprobs",
]
GPU_SERVER = [
    "--enable-scale-out",
    "--max-model-len=1024",
    "--max-num-seqs=64",
    "--gpu-memory-utilization=0.3",
    f"--kv-cache-memory-bytes={4 << 30}",
    '--compilation-config={"cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32, 64]}',
]
COLOURS = {"own": "#D55E00", "replay": "#0072B2", "routed": "#CC79A7", "forced": "#009E73"}


class GpuServer(Server):
    """`vllm serve` as users start it, on the first GPU."""

    def __init__(self, checkpoint: Path, log: Path, args: Sequence[str]) -> None:
        super().__init__(checkpoint, log, args, {"VLLM_SERVER_DEV_MODE": "1"}, timeout_s=400)
        program = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(checkpoint)]
        self.command = [*program, *args, "--host=127.0.0.1", f"--port={self.port}"]
        self.env = {**os.environ, **QUIET, "VLLM_SERVER_DEV_MODE": "1", "CUDA_VISIBLE_DEVICES": "0"}


def trainer(given: argparse.Namespace, settings: dict[str, Any]) -> Kept:
    """TRL, in a folder without the repository's own folder `vllm/`."""
    site = given.work / "site"
    site.mkdir(parents=True, exist_ok=True)
    for package in PACKAGES:
        (site / package).unlink(missing_ok=True)
        (site / package).symlink_to(ROOT / package)
    paths = [p for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p]
    kept = [p for p in paths if Path(p).resolve() != ROOT]
    if not given.nccl:
        kept = [p for p in kept if not (Path(p) / "vllm").exists()]
    env = {"PYTHONPATH": os.pathsep.join([str(site.resolve()), *kept])}
    env |= {"CUDA_VISIBLE_DEVICES": "" if given.tiny else "1" if given.nccl else "0"}
    env |= {"VLLM_HOST_IP": "127.0.0.1", "TOKENIZERS_PARALLELISM": "false"}
    command = [given.python, "-W", "ignore", "-m", "gpu.training.trainer", json.dumps(settings)]
    return Kept(command, given.out / "trainer.log", env, common=QUIET, cwd=site)


def run(given: argparse.Namespace) -> str:
    """Train, and print each step; returns what failed, or nothing."""
    end = time.time() + given.seconds
    shutil.rmtree(given.work, ignore_errors=True)
    (given.out / STEPS_FILE).unlink(missing_ok=True)
    model = TINY if given.tiny else {**MODEL, "num_experts": given.experts}
    checkpoint = make_checkpoint(given.work / "checkpoint", **model)
    print(f"checkpoint made, {end - time.time():.0f} s are left", flush=True)
    arguments = [*SERVER, *([] if given.tiny else GPU_SERVER)]
    if given.interrupt:
        arguments.append("--enable-forced-routed-experts")
    if given.nccl:
        arguments.append('--weight-transfer-config={"backend": "nccl"}')
    log = given.out / "server.log"
    if given.tiny:
        server = Server(checkpoint, log, arguments, {"VLLM_SERVER_DEV_MODE": "1"})
    else:
        server = GpuServer(checkpoint, log, arguments)
    ways = [way for way in ARMS if given.interrupt or way not in ("routed", "forced")]
    steps = {way: min(given.steps, 8) if way == "plain" else given.steps for way in ways}
    times = list(accumulate(steps[way] * TIMES[way] for way in ways))
    settings = {
        "checkpoint": str(checkpoint.resolve()),
        "work": str(given.work.resolve()),
        "out": str(given.out.resolve()),
        "url": server.url,
        "end": end - 20,
        "steps": steps,
        "shares": {way: t / times[-1] for way, t in zip(ways, times, strict=True)},
        "prompts": given.prompts,
        "tokens": given.tokens,
        "micro_batches": given.micro_batches,
        "learning_rate": given.learning_rate,
        "nccl": given.nccl,
    }
    told = 0
    # It imports and loads while the server starts.
    with trainer(given, settings) as training:
        try:
            with server:
                print(f"server ready, {end - time.time():.0f} s are left", flush=True)
                while training.poll() is None and time.time() < end - 10:
                    told = tell(given.out, told)
                    if server.poll() is not None:
                        return f"the server ended: {server.first_error() or server.last_line()}"
                    time.sleep(0.5)
        except ServerError as e:
            return str(e)
        tell(given.out, told)
        if training.poll():
            return f"the trainer failed: {training.first_error() or training.last_line()}"
    return ""


def read(out: Path) -> list[Step]:
    file = out / STEPS_FILE
    lines = file.read_text().splitlines() if file.exists() else []
    return [Step(**json.loads(line)) for line in lines]


def tell(out: Path, told: int) -> int:
    steps = read(out)
    for s in steps[told:]:
        spent = ", ".join(f"{part} {value:.2f}" for part, value in s.seconds.items())
        print(
            f"{ARMS[s.arm]}, step {s.step + 1}: mean {s.mean:.5f}, greatest {s.greatest:.3f}, "
            f"k3 {s.k3:.2e}, outside {100 * s.outside:.3f} %, own router {100 * s.differs:.2f} %; "
            f"s: {spent}",
            flush=True,
        )
    return len(steps)


def record(steps: Sequence[Step]) -> str:
    """Markdown: each way over its steps, and where the time goes."""
    found = {arm: [s for s in steps if s.arm == arm] for arm in ARMS}
    both = min(len(found["own"]), len(found["replay"]))
    lines, times = [], []
    parts = ("send", "sample", "log-probs", "train")
    for arm, mine in found.items():
        if not mine:
            continue
        same = mine[:both] if both and arm != "plain" else mine
        differs = f"{100 * statistics.mean(s.differs for s in same):.2f} %"
        mean = statistics.mean(s.mean for s in same)
        lines.append(
            (
                ARMS[arm],
                str(len(same)),
                f"{sum(s.tokens for s in same):,}",
                f"{mean:.5f}",
                f"{max(s.greatest for s in same):.3f}",
                f"{statistics.mean(s.k3 for s in same):.2e}",
                f"{100 * statistics.mean(s.outside for s in same):.4f} %",
                differs if arm != "plain" else "–",
            )
        )
        warm = mine[2:] or mine  # the first ones compile kernels
        spent = [statistics.median(s.seconds[part] for s in warm) for part in parts]
        whole = statistics.median(sum(s.seconds[part] for part in parts) for s in warm)
        times.append((ARMS[arm], str(len(warm)), *(f"{t:.2f}" for t in (*spent, whole))))
    head = (
        "Way",
        "Steps",
        "Tokens",
        "Mean",
        "Greatest",
        "KL (k3)",
        "Outside 0.5 to 2",
        "Own router differs",
    )
    return "\n".join(
        [
            table(head, lines),
            "Seconds of a step, medians:",
            "",
            table(("Way", "Steps", "Send weights", "Sample", "Log-probs", "Train", "Step"), times),
        ]
    )


def draw(path: Path, steps: Sequence[Step]) -> None:
    """Draw each figure over the steps, without and with replay."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    from demos.rows.picture import FAINT, PAPER, SOFT, STYLE

    panels = {
        "Mean difference of log-probs, nats": lambda s: s.mean,
        "Greatest difference, nats": lambda s: s.greatest,
        "KL divergence (k3), nats": lambda s: s.k3,
        "Tokens with a ratio outside 0.5 to 2, %": lambda s: 100 * s.outside,
    }
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(2, 2, figsize=(14, 8.4), dpi=110, facecolor=PAPER)
        figure.subplots_adjust(left=0.06, right=0.98, top=0.84, bottom=0.08, hspace=0.34)
        figure.text(
            0.06, 0.94, "The trainer's log-probs against the server's, at each optimizer step",
            size=18, weight="bold", va="center",
        )  # fmt: skip
        figure.text(
            0.06, 0.895, "TRL and vLLM on a GPU in bfloat16, random weights: nothing here is about "
            "learning.", size=11, color=SOFT, va="center",
        )  # fmt: skip
        for axis, (title, value) in zip(axes.flat, panels.items(), strict=True):
            for arm, colour in COLOURS.items():
                mine = [s for s in steps if s.arm == arm]
                if not mine:
                    continue
                x, y = [s.step + 1 for s in mine], [value(s) for s in mine]
                axis.plot(x, y, color=colour, linewidth=2, label=ARMS[arm])
            axis.set_title(title, loc="left", size=12, weight="bold")
            axis.set_ylim(bottom=0)
            axis.grid(axis="y", color=FAINT)
            axis.spines[["top", "right"]].set_visible(False)
            axis.xaxis.get_major_locator().set_params(integer=True)
        axes[0, 0].legend(frameon=False, labelcolor="linecolor")
        for axis in axes[1]:
            axis.set_xlabel("optimizer step")
        figure.savefig(path, facecolor=PAPER)
        plt.close(figure)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m gpu.training", description=(__doc__ or "").split("\n\n")[0]
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for what is measured")
    parser.add_argument("--work", type=Path, help="folder for weights (/dev/shm/training)")
    parser.add_argument("--seconds", type=int, default=500, help="after which all ends")
    parser.add_argument("--steps", type=int, help="optimizer steps (30; tiny: 3)")
    parser.add_argument("--experts", type=int, default=64, help="of each layer (%(default)s)")
    parser.add_argument("--prompts", type=int, help="of a step, 8 samples each (8; tiny: 2)")
    parser.add_argument("--tokens", type=int, help="of a sample (256; tiny: 16)")
    parser.add_argument("--micro-batches", type=int, help="of a step (4; tiny: 2)")
    parser.add_argument("--python", help="Python that has trl (this one)")
    parser.add_argument("--learning-rate", type=float, default=1e-4, help="(%(default)s)")
    parser.add_argument("--interrupt", action="store_true", help="also interrupt rollouts")
    parser.add_argument("--nccl", action="store_true", help="TRL sends weights to another GPU")
    parser.add_argument("--tiny", action="store_true", help="a rehearsal on a CPU")
    parser.add_argument("--draw", action="store_true", help="only draw what was measured")
    given = parser.parse_args()
    defaults = {"steps": (30, 3), "prompts": (8, 2), "tokens": (256, 16), "micro_batches": (4, 2)}
    for name, values in defaults.items():
        setattr(given, name, getattr(given, name) or values[given.tiny])
    trl = ROOT / "build" / "clients" / "trl" / "bin" / "python"
    python = given.python or (trl if given.tiny else sys.executable)
    given.python = os.path.abspath(python)
    given.work = given.work or (given.out / "work" if given.tiny else Path("/dev/shm/training"))
    given.out.mkdir(parents=True, exist_ok=True)
    failed = "" if given.draw else run(given)
    steps = read(given.out)
    if steps:
        text = record(steps)
        (given.out / "training.md").write_text(text + "\n")
        print(text)
        draw(given.out / "training.png", steps)
    if failed:
        print(f"FAILED  {failed}")
    return int(bool(failed) or {"own", "replay"} - {s.arm for s in steps} != set())


if __name__ == "__main__":
    sys.exit(main())
