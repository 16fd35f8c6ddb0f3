# SPDX-License-Identifier: Apache-2.0
"""Every parallel layout returns the same rows: one cell a layout, on 1, 2 or 4 GPUs.

    python tests/gpu/layouts.py --gpus 2 --out DIR [--only tp2,dp2ep2] [--minutes 8]

A cell starts the layout's engines with a small random model, sends them prompts of which two in
three ask for rows, and compares every row with two oracles:

- the top-k of the router logits that its own ranks recorded in front of dispatch, gathered here;
- one GPU's rows of the same prompts, and of what follows as long as it is the same. Floating-point
  noise may turn a close decision, and later layers and positions then differ too; each first
  difference must have a margin (k-th less (k+1)-th logit on one GPU) below `MARGIN`. Logits spread
  over more than +-10.

A finished cell is one line of `cells.jsonl`; started again, the program skips cells that passed.
What a host cannot run (GPUs, Ray, time) is "unverified".
`layouts.md` is the table of all, `logs.txt` says what failed cells' engines said last. Cells share
the GPUs: their models are small. The exit status counts failed cells.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import dataclasses
import json
import os
import re
import sys
import tempfile
import threading
import time
import traceback
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(ROOT), str(HERE)]

import numpy as np  # noqa: E402

from benchmarks import hosts  # noqa: E402
from examples.demo.checkpoint import make_checkpoint  # noqa: E402
from examples.demo.server import Kept, Server, ServerError  # noqa: E402
from examples.shapes import GPT_OSS  # noqa: E402

MARGIN = 0.1
CHUNK = 256
LENGTHS = (5, 300, 33, 700, 64, 2, 257, 128, 3, 17, 90, 411)

ENVIRONMENT = {
    **hosts.environment(HERE),
    "VLLM_SERVER_DEV_MODE": "1",
    "OMP_NUM_THREADS": "2",
}
CPU_ENVIRONMENT = {"VLLM_CPU_KVCACHE_SPACE": "1"}

OPTIONS: dict[str, Any] = {
    "max_model_len": 1024,
    "max_num_batched_tokens": CHUNK,
    "max_num_seqs": 8,
    "enforce_eager": True,
    "enable_prefix_caching": False,
    "enable_return_routed_experts": True,
    "routed_experts_opt_in": True,
    "skip_tokenizer_init": True,
    "kv_cache_memory_bytes": 256 << 20,
    "gpu_memory_utilization": 0.02,
    "disable_custom_all_reduce": True,
    "seed": 0,
}
GRAPHS = {"enforce_eager": False, "compilation_config": {"cudagraph_capture_sizes": [1, 2, 4, 8]}}


def eplb(asynchronous: bool) -> dict[str, Any]:
    return {
        "enable_eplb": True,
        "eplb_config": {
            "num_redundant_experts": 8,
            "window_size": 4,
            "step_interval": 6,
            "use_async": asynchronous,
        },
    }


EP = {"enable_expert_parallel": True}


@dataclasses.dataclass(frozen=True)
class Cell:
    """One layout.

    Attributes:
        gpus: how many it needs.
        options: of the engine.
        dp: offline engines that form one data parallel group through VLLM_DP_*.
        model: a key of `MODELS`.
        dtype: of the model; "" for the one that the reference took.
        tokens: returned for each prompt.
        records: whether ranks record their router logits (not with CUDA graphs).
        serve: arguments of each `vllm serve`; empty for offline engines.
        hosts: the host counts (GPUs) whose default run has the cell.
        note: for the table.
    """

    gpus: int
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    dp: int = 1
    model: str = "qwen3"
    dtype: str = ""
    tokens: int = 24
    records: bool = True
    serve: tuple[tuple[str, ...], ...] = ()
    hosts: tuple[int, ...] = (2, 4)
    note: str = ""


def tp(size: int, **more: Any) -> dict[str, Any]:
    return {"tensor_parallel_size": size, **more}


SERVE_DP = ("--data-parallel-size=2", "--enable-expert-parallel")
# In the order in which they start.
CELLS: dict[str, Cell] = {
    "one": Cell(1, hosts=(1, 2, 4), note="one GPU, the reference"),
    "one-bf16": Cell(1, dtype="bfloat16", hosts=(1, 2, 4), note="one GPU"),
    "dp2ep2": Cell(2, EP, dp=2, note="DP2+EP2, engines joined by VLLM_DP_*"),
    "tp2": Cell(2, tp(2), hosts=(2,), note="TP2"),
    "sp": Cell(4, tp(2, **EP), dp=2, hosts=(4,), note="TP2xDP2+EP4: sequence parallel MoE"),
    "dp4ep4": Cell(4, EP, dp=4, hosts=(4,), note="DP4+EP4"),
    "tp2pp2": Cell(4, tp(2, pipeline_parallel_size=2), hosts=(4,), note="TP2xPP2"),
    "pp2": Cell(2, {"pipeline_parallel_size": 2}, hosts=(2,), note="PP2"),
    "tp4": Cell(4, tp(4), hosts=(4,), note="TP4"),
    "sp-gptoss": Cell(
        4, tp(2, **EP), dp=2, model="gptoss", hosts=(4,), note="the same, gpt-oss, MXFP4"
    ),
    "tp2ep": Cell(2, tp(2, **EP), hosts=(2,), note="TP2+EP2"),
    "eplb": Cell(
        2, {**EP, **eplb(False)}, dp=2, tokens=120, hosts=(2,), note="DP2+EP2, EPLB, 8 redundant"
    ),
    "eplb-async": Cell(
        2,
        {**EP, **eplb(True)},
        dp=2,
        tokens=120,
        hosts=(2,),
        note="DP2+EP2, asynchronous EPLB, 8 redundant",
    ),
    "dp2ep2-gptoss": Cell(2, EP, dp=2, model="gptoss", hosts=(2,), note="DP2+EP2, gpt-oss, MXFP4"),
    "dp2ep2-graphs": Cell(
        2, {**EP, **GRAPHS}, dp=2, records=False, hosts=(2,), note="DP2+EP2, CUDA graphs"
    ),
    "serve-internal": Cell(
        2,
        serve=((*SERVE_DP, "--api-server-count=2"),),
        hosts=(2,),
        note="DP2+EP2 behind vllm serve, two API servers, internal load balancing",
    ),
    "serve-external": Cell(
        2,
        serve=tuple((*SERVE_DP, f"--data-parallel-rank={i}") for i in range(2)),
        hosts=(2,),
        note="DP2+EP2, a vllm serve each, external load balancing",
    ),
    "dcp2": Cell(
        2,
        tp(2, decode_context_parallel_size=2),
        model="one-kv-head",
        dtype="bfloat16",
        hosts=(2,),
        note="TP2, decode context parallel 2",
    ),
    "dp2": Cell(2, dp=2, hosts=(2,), note="DP2 without EP"),
    "ray2": Cell(2, tp(2, distributed_executor_backend="ray"), hosts=(2,), note="TP2, Ray"),
    "sp-eplb": Cell(
        4, tp(2, **EP, **eplb(False)), dp=2, tokens=120, hosts=(4,), note="SP, EPLB, 8 redundant"
    ),
    "sp-graphs": Cell(
        4, tp(2, **EP, **GRAPHS), dp=2, records=False, hosts=(4,), note="SP, CUDA graphs"
    ),
    "tp2dp2": Cell(4, tp(2), dp=2, hosts=(4,), note="TP2xDP2 without EP"),
    "pp4": Cell(4, {"pipeline_parallel_size": 4}, hosts=(4,), note="PP4"),
    "pp2dp2ep": Cell(4, {"pipeline_parallel_size": 2, **EP}, dp=2, hosts=(4,), note="PP2xDP2+EP2"),
    "serve": Cell(1, serve=((),), hosts=(), note="vllm serve, one GPU"),
}
QWEN3: dict[str, Any] = {
    "hidden_size": 256,
    "head_dim": 64,
    "num_hidden_layers": 6,
    "initializer_range": 0.0625,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 128,
}


def make_model(name: str, folder: Path) -> Path:
    """The model's folder; the gpt-oss shape has a configuration alone."""
    if name == "gptoss":
        (folder / name).mkdir(parents=True, exist_ok=True)
        (folder / name / "config.json").write_text(json.dumps(GPT_OSS))
        return folder / name
    # Four key-value heads, so that four pipeline or tensor parallel ranks have one each.
    heads = {"num_key_value_heads": 1 if name == "one-kv-head" else 4}
    return make_checkpoint(folder / name, **QWEN3, **heads)


def make_prompts(vocabulary: int = 700) -> list[list[int]]:
    """Each begins differently, so its beginning names it."""
    rng = np.random.default_rng(0)
    return [
        [10 + i, *(int(t) for t in rng.integers(4, vocabulary, n - 1))]
        for i, n in enumerate(LENGTHS)
    ]


def asks(index: int) -> bool:
    return index % 3 != 2


# --- an offline engine, in a process of its own ---------------------------------------------------


def run_engine(spec: dict[str, Any]) -> None:
    """One engine; all of a data parallel group run this at once."""
    scratch = Path(spec["scratch"])
    rank, size = spec["rank"], spec["dp"]
    try:
        from vllm import LLM, SamplingParams

        llm = LLM(spec["model"], **spec["options"])
    except Exception as e:
        (scratch / f"error-{rank}.txt").write_text(f"{type(e).__name__}: {e}")
        raise
    if spec["spread"]:
        llm.collective_rpc("spread_routers", args=(spec["spread"],))
    if spec["records"]:
        llm.collective_rpc("record_start")
    indices = range(rank, len(LENGTHS), size)
    prompts = make_prompts()
    params = [
        SamplingParams(
            temperature=0.0,
            ignore_eos=True,
            max_tokens=spec["tokens"],
            detokenize=False,
            extra_args={"return_routed_experts": asks(i)},
        )
        for i in indices
    ]
    outputs = llm.generate(
        [{"prompt_token_ids": prompts[i]} for i in indices], params, use_tqdm=False
    )
    for i, output in zip(indices, outputs, strict=True):
        completion = output.outputs[0]
        save_answer(
            scratch,
            i,
            list(completion.token_ids),
            completion.routed_experts,
            getattr(completion, "routed_experts_start", 0),
            getattr(completion, "moe_layers", None),
        )
    # A rank that leaves takes its collectives along: wait for the others.
    (scratch / f"generated-{rank}").touch()
    while len(list(scratch.glob("generated-*"))) < size:
        time.sleep(0.1)
    if spec["records"]:
        llm.collective_rpc("record_flush", args=(str(scratch / f"logits{rank}"),))
    (scratch / f"done-{rank}").touch()
    while len(list(scratch.glob("done-*"))) < size:
        time.sleep(0.1)
    leave(llm)


def leave(llm: Any) -> None:
    """End the engine, but don't wait long for it: it has nothing more to say, and the keeper
    ends what is left."""
    shutdown = threading.Thread(target=llm.llm_engine.engine_core.shutdown, daemon=True)
    shutdown.start()
    shutdown.join(10)
    os._exit(0)


def save_answer(
    scratch: Path, index: int, tokens: list[int], rows: Any, start: Any, layers: Any
) -> None:
    record: dict[str, Any] = {"tokens": np.array(tokens)}
    if rows is not None:
        record.update(rows=rows, start=np.array(start), layers=np.array(layers))
    np.savez(scratch / f"answer-{index}.npz", **record)


# --- cells ----------------------------------------------------------------------------------------


class Failed(Exception):
    """The cell's engines did not do what was asked."""


class Refused(Exception):
    """The build refuses the layout at start."""


class TooFewGpus(Exception):
    """This host cannot run the cell."""


def free_port(number: list[int] = [21000]) -> int:  # noqa: B006
    """The first of 64 ports that nobody else here gets."""
    number[0] += 64
    return number[0]


def device_environment(device: str, gpus: int, slot: int, count: int) -> dict[str, str]:
    """For `gpus` of the host's `count`; cells of other slots take others if they can."""
    if device == "cuda":
        first = slot % (count - gpus + 1)
        visible = ",".join(str(i) for i in range(first, first + gpus))
        return {**ENVIRONMENT, "CUDA_VISIBLE_DEVICES": visible}
    cores = os.cpu_count() or 1
    threads = "|".join(str(i % cores) for i in range(gpus))
    binding = {"VLLM_CPU_OMP_THREADS_BIND": threads} if gpus > 1 else {}
    return {**ENVIRONMENT, **CPU_ENVIRONMENT, **binding}


def run_cell(
    cell: Cell,
    dtype: str,
    folder: Path,
    scratch: Path,
    environment: dict[str, str],
    limit_s: float,
) -> None:
    """Run the layout; answers and logits are then in `scratch`.

    Raises:
        Refused: it does not start, and says that this is on purpose.
        Failed: any other end.
    """
    began = time.monotonic()
    model = make_model(cell.model, folder)
    options: dict[str, Any] = {**OPTIONS, "dtype": cell.dtype or dtype, **cell.options}
    if not options["enforce_eager"]:
        environment["TORCH_COMPILE_DISABLE"] = "0"
    if cell.model == "gptoss":
        options |= {"load_format": "dummy", "dtype": "bfloat16"}
    if cell.records:
        options["worker_extension_cls"] = "layouts_recorder.Recorder"
    if cell.serve:
        run_servers(cell, model, options, environment, scratch, limit_s)
        return
    port = free_port()
    with contextlib.ExitStack() as stack:
        engines = []
        for rank in range(cell.dp):
            spec = {
                "model": str(model),
                "options": options,
                "rank": rank,
                "dp": cell.dp,
                "scratch": str(scratch),
                "records": cell.records,
                "tokens": cell.tokens,
                "spread": 0.5 if cell.model == "gptoss" else 0,
            }
            (scratch / f"spec-{rank}.json").write_text(json.dumps(spec))
            command = [sys.executable, __file__, "--engine", str(scratch / f"spec-{rank}.json")]
            engine = Kept(
                command,
                scratch / f"engine-{rank}.log",
                {**environment, **hosts.data_parallel(rank, cell.dp, port)},
            )
            engines.append(stack.enter_context(engine))
        while not all((scratch / f"done-{rank}").exists() for rank in range(cell.dp)):
            raise_refusal(scratch)
            for error in scratch.glob("error-*.txt"):
                causes = [engine.first_error() for engine in engines]
                raise Failed(f"{error.read_text()} ({'; '.join(filter(None, causes))})")
            for rank, engine in enumerate(engines):
                if engine.poll() is not None and not (scratch / f"done-{rank}").exists():
                    time.sleep(1)
                    raise_refusal(scratch)
                    raise Failed(engine.first_error() or engine.last_line() or "ended silently")
            if time.monotonic() - began > limit_s:
                raise Failed(f"not finished after {limit_s:.0f} s: {engines[0].last_line()}")
            time.sleep(0.2)


REFUSAL = re.compile(
    r"(?:--enable-return-routed-experts|enable_return_routed_experts)"
    r" (?:does not support|supports|found no) [^\n]*"
)


def raise_refusal(scratch: Path) -> None:
    for log in scratch.glob("*.log"):
        text = log.read_text(errors="replace")
        if found := REFUSAL.findall(text):
            raise Refused(found[-1].split(" [type=")[0])


def run_servers(
    cell: Cell,
    model: Path,
    options: dict[str, Any],
    environment: dict[str, str],
    scratch: Path,
    limit_s: float,
) -> None:
    arguments = []
    # The server's prompts are ids too, but some of its endpoints want the tokenizer.
    for name, value in {**options, "skip_tokenizer_init": False}.items():
        flag = "--" + name.replace("_", "-")
        if value is True:
            arguments.append(flag)
        elif value is False:
            arguments.append("--no-" + flag[2:])
        else:
            arguments.append(f"{flag}={value}")
    rpc = [f"--data-parallel-rpc-port={free_port()}", "--data-parallel-address=127.0.0.1"]
    servers: list[Server] = []
    prompts = make_prompts()

    def start(number: int) -> Server:
        more, own = [], {}
        if len(cell.serve) > 1:
            more = rpc
            visible = environment.get("CUDA_VISIBLE_DEVICES", "").split(",")
            own = {"CUDA_VISIBLE_DEVICES": visible[number % len(visible)]}
        server = Server(
            model,
            scratch / f"server-{number}.log",
            [*arguments, *cell.serve[number], *more],
            environment | own,
            timeout_s=limit_s * 0.8,
        )
        return server.__enter__()

    def ask(index: int) -> None:
        server = servers[index % len(servers)]
        answer = server.generate(
            prompts[index],
            max_tokens=cell.tokens,
            ignore_eos=True,
            extra_args={"return_routed_experts": asks(index)},
        )
        save_answer(
            scratch,
            index,
            list(answer.token_ids),
            answer.rows,
            answer.start,
            list(answer.moe_layers),
        )

    with contextlib.ExitStack() as stack, concurrent.futures.ThreadPoolExecutor(12) as pool:
        try:
            starting = [pool.submit(start, n) for n in range(len(cell.serve))]
            for future in concurrent.futures.as_completed(starting):
                if error := future.exception():
                    raise error
            for future in starting:
                servers.append(future.result())
                stack.callback(servers[-1].stop)
            for server in servers:
                server.post("/collective_rpc", {"method": "record_start"})
            list(pool.map(ask, range(len(prompts))))
            for n, server in enumerate(servers):
                server.post(
                    "/collective_rpc",
                    {"method": "record_flush", "args": [str(scratch / f"logits{n}")]},
                )
        except ServerError as e:
            raise_refusal(scratch)
            raise Failed(str(e)) from e
        finally:
            for future in starting:
                if future.done() and not future.exception():
                    future.result().stop()


# --- oracles --------------------------------------------------------------------------------------


@dataclasses.dataclass
class Answer:
    tokens: list[int]
    rows: Any
    start: int
    layers: tuple[int, ...]


def read_answers(scratch: Path) -> dict[int, Answer]:
    answers = {}
    for index in range(len(LENGTHS)):
        with np.load(scratch / f"answer-{index}.npz") as data:
            there = "rows" in data
            answers[index] = Answer(
                data["tokens"].tolist(),
                data["rows"] if there else None,
                int(data["start"]) if there else 0,
                tuple(data["layers"].tolist()) if there else (),
            )
    return answers


# By prompt, then layer: (positions, experts) float32, NaN where nothing was recorded.
Logits = dict[int, dict[int, Any]]


def gather_logits(scratch: Path) -> tuple[Logits, bool]:
    """Put the ranks' records together; whether EPLB moved experts."""
    by_first = {prompt[0]: i for i, prompt in enumerate(make_prompts())}
    groups: dict[tuple[str, int], dict[tuple[int, int], Any]] = defaultdict(dict)
    moved = False
    for file in sorted(scratch.glob("logits*.npz")):
        data = dict(np.load(file))
        meta = json.loads(str(data.pop("meta")))
        moved |= meta["moved"]
        ranks = meta["ranks"]
        groups[(file.name.split("-")[0], ranks["dp"])][(ranks["pp"], ranks["tp"])] = (meta, data)
    if not groups:
        raise Failed("no rank recorded anything")
    logits: Logits = defaultdict(dict)
    for members in groups.values():
        steps = next(iter(members.values()))[0]["steps"]
        assert all(meta["steps"] == steps for meta, _ in members.values())
        for number, step in enumerate(steps):
            layers = {
                int(k.split("/")[1])
                for _, data in members.values()
                for k in data
                if k.startswith(f"{number}/") and not k.endswith("positions")
            }
            positions = next(iter(members.values()))[1][f"{number}/positions"]
            for layer in layers:
                parts = [
                    data[f"{number}/{layer}"]
                    for _, (_, data) in sorted(members.items())
                    if f"{number}/{layer}" in data
                ]
                # Each tensor parallel rank has all tokens, or its chunk of them.
                whole = parts[0]
                if len(whole) < len(positions):
                    whole = np.concatenate(parts)[: len(positions)]
                for prompt, begin, end in zip(
                    step["first"], step["starts"], step["starts"][1:], strict=False
                ):
                    index = by_first[prompt]
                    table = logits[index].setdefault(
                        layer,
                        np.full(
                            (OPTIONS["max_model_len"], whole.shape[1]),
                            np.nan,
                            np.float32,
                        ),
                    )
                    table[positions[begin:end]] = whole[begin:end]
    return logits, moved


def check_own_logits(answers: dict[int, Answer], logits: Logits) -> int:
    """Every row is the top-k of its own ranks' logits; the number of decisions."""
    decisions = 0
    for index, answer in answers.items():
        if answer.rows is None:
            continue
        for layer in answer.layers:
            rows = answer.rows[:, layer].astype(np.int64)
            own = logits[index][layer][: len(rows)]
            if np.isnan(own).any():
                raise Failed(f"prompt {index}, layer {layer}: tokens without recorded logits")
            chosen = np.sort(np.take_along_axis(own, rows, 1), 1)
            greatest = np.sort(own, 1)[:, -rows.shape[1] :]
            wrong = ~np.isclose(chosen, greatest, rtol=1e-6, atol=1e-6).all(1)
            if wrong.any():
                raise Failed(
                    f"prompt {index}, layer {layer}: {wrong.sum()} of {len(rows)} rows are not "
                    f"the top-k of their logits, first at position {wrong.argmax()}"
                )
            decisions += len(rows)
    return decisions


def check_answers(answers: dict[int, Answer], num_layers: int, tokens: int) -> int:
    """Who asked has all rows, of distinct experts, and nobody else; their number."""
    count = 0
    for index, answer in answers.items():
        if not asks(index):
            if answer.rows is not None:
                raise Failed(f"prompt {index} did not ask and got rows")
            continue
        if answer.rows is None:
            raise Failed(f"prompt {index} asked and got no rows")
        wanted = LENGTHS[index] + tokens - 1
        if answer.start or len(answer.rows) != wanted:
            raise Failed(f"prompt {index}: {len(answer.rows)} rows from {answer.start}")
        if answer.layers != tuple(range(num_layers)) or answer.rows.shape[1] != num_layers:
            raise Failed(f"prompt {index}: layers {answer.layers} of {num_layers}")
        if not (np.diff(np.sort(answer.rows.astype(int), axis=2), axis=2) > 0).all():
            raise Failed(f"prompt {index}: an expert twice in one row")
        count += wanted
    return count


def check_reference(
    answers: dict[int, Answer], reference: dict[int, Answer], logits: Logits
) -> dict[str, Any]:
    """Compare rows with one GPU's, as far as the tokens are the same; `logits` are those of the
    one GPU."""
    decisions = differ = first = 0
    worst = 0.0
    for index, answer in answers.items():
        if answer.rows is None:
            continue
        pairs = zip(answer.tokens, reference[index].tokens, strict=False)
        same = next((i for i, (a, b) in enumerate(pairs) if a != b), len(answer.tokens))
        length = min(LENGTHS[index] + same, len(answer.rows), len(reference[index].rows))
        got = np.sort(answer.rows[:length].astype(int), 2)
        want = np.sort(reference[index].rows[:length].astype(int), 2)
        wrong = (got != want).any(2)
        decisions += wrong.size
        differ += int(wrong.sum())
        for position, layer in zip(*wrong.nonzero(), strict=True):
            # What an earlier layer turned, here or at a position before, turns later ones.
            if wrong[: position + 1, :layer].any():
                continue
            first += 1
            ordered = np.sort(logits[index][int(layer)][position])
            k = got.shape[2]
            worst = max(worst, float(ordered[-k] - ordered[-k - 1]))
    if worst >= MARGIN:
        raise Failed(f"differs from one GPU at a margin of {worst:.3g}, {first} first differences")
    return {
        "against_one": decisions,
        "differ": differ,
        "first_differ": first,
        "greatest_margin": worst,
    }


# --- the program ----------------------------------------------------------------------------------


class Run:
    def __init__(self, arguments: argparse.Namespace, work: Path) -> None:
        self.arguments = arguments
        self.out: Path = arguments.out
        self.work = work
        self.deadline = time.monotonic() + 60 * arguments.minutes
        self.lock = threading.Lock()
        self.out.mkdir(parents=True, exist_ok=True)
        self.record = self.out / "cells.jsonl"
        self.references: dict[str, tuple[dict[int, Answer], Logits]] = {}

    def results(self) -> dict[str, dict[str, Any]]:
        if not self.record.exists():
            return {}
        lines = [json.loads(line) for line in self.record.read_text().splitlines() if line]
        return {line["cell"]: line for line in lines}

    def run(self, name: str, slot: int, dtype: str) -> dict[str, Any]:
        cell = CELLS[name]
        began = time.monotonic()
        result: dict[str, Any] = {"cell": name, "gpus": cell.gpus, "note": cell.note}
        scratch = self.work / name
        scratch.mkdir()
        try:
            check_gpus(cell, self.arguments.device)
            if name.startswith("ray"):
                check_ray()
            limit_s = min(self.arguments.cell_seconds, self.deadline - time.monotonic())
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
        except (TooFewGpus, ImportError, TimeoutError) as e:
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
        # The reference is made anew: its rows are not in the record.
        first = [] if arguments.no_reference else ["one"]
        first += [n for n in names if n == "one-bf16" and n not in done]
        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            tried = list(pool.map(lambda p: self.run(p[1], p[0], dtype), enumerate(first)))
        if "one" in first and tried[0]["result"] != "ok":
            print("no float32 of one GPU: bfloat16, and no comparison with it", flush=True)
            dtype = "bfloat16"
        rest = [n for n in names if n not in ("one", "one-bf16") and n not in done]
        with concurrent.futures.ThreadPoolExecutor(arguments.together) as pool:
            list(pool.map(lambda p: self.run(p[1], p[0], dtype), enumerate(rest)))
        print(self.table())
        results = self.results()
        return sum(r["result"].startswith("FAILED") for r in results.values())

    def table(self) -> str:
        lines = [
            "| Cell | Layout | GPUs | Result | Rows | Decisions, own logits | Differ from one GPU |"
            " s |",
            "| --- | --- | --- | --- | --- | --- | --- | --- |",
        ]
        for name, r in self.results().items():
            against = "-"
            if "against_one" in r:
                against = f"{r['differ']} of {r['against_one']}"
                if r["differ"]:
                    against += f" ({r['first_differ']} first, margin <= {r['greatest_margin']:.2g})"
            dtype = f", {r['dtype']}" if "dtype" in r else ""
            moved = ", experts moved" if r.get("experts_moved") else ""
            lines.append(
                f"| {name} | {r['note']}{dtype}{moved} | {r['gpus']} | {r['result']} | "
                f"{r.get('rows', '-')} | {r.get('decisions', '-')} | {against} | {r['seconds']} |"
            )
        return "\n".join(lines) + f"\n\nStated margin: {MARGIN}.\n"


def check_gpus(cell: Cell, device: str) -> None:
    """See that this host can run the cell.

    Raises:
        TooFewGpus: it cannot.
    """
    import torch

    if device == "cuda" and (count := torch.cuda.device_count()) < cell.gpus:
        raise TooFewGpus(f"wants {cell.gpus} GPUs, this host has {count}")


def check_ray() -> None:
    try:
        import ray  # noqa: F401
    except ImportError as e:
        raise ImportError("no Ray on the host") from e


@contextlib.contextmanager
def working_folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="layouts-") as folder:
        (Path(folder) / "models").mkdir()
        yield Path(folder)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gpus", type=int, choices=[1, 2, 4], default=2)
    parser.add_argument("--out", type=Path, default=Path("build/layouts"))
    parser.add_argument("--only", type=lambda s: s.split(","), help="cells, comma-separated")
    parser.add_argument("--no-reference", action="store_true", help="own logits alone")
    parser.add_argument("--minutes", type=float, default=8.0, help="no cell runs after that")
    parser.add_argument("--cell-seconds", type=float, default=180.0, help="a cell's limit")
    parser.add_argument("--together", type=int, default=3, help="cells at a time")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--engine", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.engine:
        run_engine(json.loads(arguments.engine.read_text()))
        return 0
    if unknown := set(arguments.only or []) - set(CELLS):
        parser.error(f"unknown cells {sorted(unknown)}: of {', '.join(CELLS)}")
    with working_folder() as work:
        return Run(arguments, work).all()


if __name__ == "__main__":
    raise SystemExit(main())
