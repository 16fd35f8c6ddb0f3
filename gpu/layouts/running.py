# SPDX-License-Identifier: Apache-2.0
"""Runs one layout: its offline engines or servers, until answers and logits are on disk."""

from __future__ import annotations

import concurrent.futures
import contextlib
import importlib.util
import itertools
import os
import re
import time
from pathlib import Path
from typing import Any

from examples import proxy
from examples.client import generate
from gpu.layouts.answers import Failed, save_answer
from gpu.layouts.cells import OPTIONS, Cell, asks, make_model, make_prompts
from harness import disaggregated, hosts
from harness.server import Server, ServerError

# Each is the first of 64 ports for one cell.
PORTS = itertools.count(21000, 64)

ENVIRONMENT = {**hosts.environment(), "VLLM_SERVER_DEV_MODE": "1", "OMP_NUM_THREADS": "2"}


class Refused(Exception):
    """The build refuses the layout at start."""


def device_environment(device: str, gpus: int, slot: int, count: int) -> dict[str, str]:
    """Variables for `gpus` of the host's `count` GPUs; cells of other slots take others if
    possible."""
    if device == "cuda":
        first = slot % (count - gpus + 1)
        visible = ",".join(str(i) for i in range(first, first + gpus))
        return {**ENVIRONMENT, "CUDA_VISIBLE_DEVICES": visible}
    cores = os.cpu_count() or 1
    threads = "|".join(str(i % cores) for i in range(gpus))
    binding = {"VLLM_CPU_OMP_THREADS_BIND": threads} if gpus > 1 else {}
    return {**ENVIRONMENT, "VLLM_CPU_KVCACHE_SPACE": "1", **binding}


def run_cell(
    cell: Cell, dtype: str, folder: Path, scratch: Path, environment: dict[str, str], limit_s: float
) -> None:
    """Run the layout and write answers and logits into `scratch`. Raises Refused if the build
    refuses the layout by name, else Failed."""
    began = time.monotonic()
    model = make_model(cell.model, folder)
    options: dict[str, Any] = {**OPTIONS, "dtype": cell.dtype or dtype, **cell.options}
    if not options["enforce_eager"]:
        environment["TORCH_COMPILE_DISABLE"] = "0"
    if cell.model == "gptoss":
        options |= {"load_format": "dummy", "dtype": "bfloat16"}
    if cell.records:
        options["worker_extension_cls"] = "harness.recorder.Recorder"
    if options.get("distributed_executor_backend") == "ray":
        import ray

        # The address by which Ray knows the node.
        environment["VLLM_HOST_IP"] = ray.util.get_node_ip_address()
    if cell.serve:
        run_servers(cell, model, options, environment, scratch, limit_s)
        return
    specs = [
        {
            "model": model,
            "options": options,
            "rank": rank,
            "dp": cell.dp,
            "scratch": scratch,
            "records": cell.records,
            "tokens": cell.tokens,
            "spread": 0.5 if cell.model == "gptoss" else 0,
        }
        for rank in range(cell.dp)
    ]
    with hosts.ranks("gpu.layouts.engine", specs, scratch, environment, next(PORTS)) as engines:
        why = hosts.wait(
            engines,
            scratch,
            limit_s - time.monotonic() + began,
            look=lambda: raise_refusal(scratch),
        )
        if why:
            raise_refusal(scratch)
            causes = {engine.first_error() for engine in engines} - {""}
            raise Failed("; ".join([why, *(cause for cause in causes if cause not in why)]))


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
    # Prompts are ids here too, but some endpoints need the tokenizer.
    for name, value in {**options, "skip_tokenizer_init": False}.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            arguments.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            arguments.append(f"--{flag}={value}")
    package = importlib.util.find_spec("vllm")
    origin = package.origin if package else None
    if origin and (Path(origin).parent / "entrypoints/scale_out").is_dir():
        arguments.append("--enable-scale-out")  # v0.33.0: /inference/v1/generate
    rpc = [f"--data-parallel-rpc-port={next(PORTS)}", "--data-parallel-address=127.0.0.1"]
    servers: list[Server] = []
    front: str | None = None
    prompts = make_prompts()

    def make_server(number: int) -> Server:
        more: list[str] = []
        own: dict[str, str] = {}
        visible = environment.get("CUDA_VISIBLE_DEVICES", "")
        if cell.disaggregated:
            role = (disaggregated.PREFILL, disaggregated.DECODE)[number]
            more, own = disaggregated.nixl(role, "cuda" if visible else "cpu")
        elif len(cell.serve) > 1:
            more = rpc
        if len(cell.serve) > 1:
            gpus = visible.split(",")
            own["CUDA_VISIBLE_DEVICES"] = gpus[number % len(gpus)]
        return Server(
            model,
            scratch / f"server-{number}.log",
            [*arguments, *cell.serve[number], *more],
            environment | own,
            timeout_s=limit_s * 0.8,
        )

    def ask(index: int) -> None:
        server = servers[index % len(servers)]
        sampling: dict[str, Any] = {
            "temperature": 0.0,
            "max_tokens": cell.tokens,
            "ignore_eos": True,
        }
        if asks(index) and index % 2:
            (answer,) = generate(front or server.url, prompts[index], sampling, stream=True)
        else:
            sampling["return_routed_experts"] = asks(index)
            answer = server.generate(prompts[index], proxy=front, **sampling)
        save_answer(scratch, index, answer)

    with contextlib.ExitStack() as stack, concurrent.futures.ThreadPoolExecutor(12) as pool:
        try:
            made = map(make_server, range(len(cell.serve)))
            # All start at once; each that has started is stopped at the end.
            servers += pool.map(stack.enter_context, made)
            if cell.disaggregated:
                front = stack.enter_context(proxy.running(*(server.url for server in servers)))
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
