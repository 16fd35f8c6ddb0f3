# SPDX-License-Identifier: Apache-2.0
"""Engines on a host with several GPUs and without a network: their environment and processes.
The ranks of a data parallel group meet by files in a folder."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from harness.process import Kept

ROOT = Path(__file__).resolve().parents[1]


def environment() -> dict[str, str]:
    """Variables of an engine there; its workers import from the repository."""
    path = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        # NVLink multicast stays off.
        "NCCL_NVLS_ENABLE": "0",
        "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
        "NVSHMEM_DISABLE_NVLS": "1",
        "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        # Without a network, vLLM finds no address.
        "VLLM_HOST_IP": "127.0.0.1",
        "PYTHONPATH": os.pathsep.join(path),
    }


def data_parallel(rank: int, size: int, port: int) -> dict[str, str]:
    """Variables that make an offline engine one rank of a data parallel group of `size`; none for a
    single engine. `port` is the first of several free ports."""
    if size == 1:
        return {}
    return {
        "VLLM_DP_RANK": str(rank),
        "VLLM_DP_RANK_LOCAL": str(rank),
        "VLLM_DP_SIZE": str(size),
        "VLLM_DP_MASTER_IP": "127.0.0.1",
        "VLLM_DP_MASTER_PORT": str(port),
    }


@contextmanager
def ranks(
    module: str,
    specs: Sequence[Mapping[str, Any]],
    folder: Path,
    environment: Mapping[str, str],
    port: int,
    name: str = "engine",
) -> Iterator[list[Kept]]:
    """The processes of a data parallel group: `python -m MODULE SPEC` for each spec, a JSON file.
    `folder` gets these files and `<name>-<rank>.log`; `port` is the first of several free ones."""
    with ExitStack() as stack:
        group = []
        for rank, spec in enumerate(specs):
            file = folder / f"spec-{name}-{rank}.json"
            file.write_text(json.dumps(spec, default=str))
            command = [sys.executable, "-m", module, str(file)]
            own = data_parallel(rank, len(specs), port)
            kept = Kept(command, folder / f"{name}-{rank}.log", {**environment, **own})
            group.append(stack.enter_context(kept))
        yield group


def wait(
    engines: Sequence[Kept],
    folder: Path,
    limit_s: float,
    *,
    name: str = "done",
    look: Callable[[], object] = lambda: None,
    every_s: float = 0.2,
) -> str:
    """Wait until all ranks of a group have met at `name`, or cannot meet any more; `look` is called
    meanwhile. Returns why they did not meet; empty if they did."""
    deadline = time.monotonic() + limit_s
    while True:
        look()
        # In this order: a rank may meet and end in between.
        ended = [engine.poll() is not None for engine in engines]
        met = [(folder / f"{name}-{rank}").exists() for rank in range(len(engines))]
        if all(met):
            return ""
        for engine, has_ended, has_met in zip(engines, ended, met, strict=True):
            if has_ended and not has_met:
                why = engine.first_error() or engine.last_line() or "it said nothing"
                return f"an engine ended: {why}"
        if time.monotonic() > deadline:
            return f"not finished after {limit_s:.0f} s: {engines[0].last_line()}"
        time.sleep(every_s)


def meet(folder: Path, name: str, rank: int, size: int) -> None:
    """Wait until every rank is here. A rank that ends breaks the collectives of the others."""
    (folder / f"{name}-{rank}").touch()
    while not all((folder / f"{name}-{other}").exists() for other in range(size)):
        time.sleep(0.02)


def run(rank: Callable[[dict[str, Any]], object]) -> None:
    """Run a rank with the spec that it was started with. A rank that fails ends at once, since its
    collectives wait for the others."""
    try:
        rank(json.loads(Path(sys.argv[1]).read_text()))
    except BaseException:
        traceback.print_exc()
        sys.stdout.flush()
        os._exit(1)


def leave(llm: Any) -> None:
    """End the process of an offline engine without waiting long: the keeper ends what is left."""
    shutdown = threading.Thread(target=llm.llm_engine.engine_core.shutdown, daemon=True)
    shutdown.start()
    shutdown.join(10)
    os._exit(0)
