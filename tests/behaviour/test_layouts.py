# SPDX-License-Identifier: Apache-2.0
"""Tensor, pipeline and data parallel engines of several processes return the oracle's rows."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from examples.client import Completion
from harness.process import Kept, free_port
from harness.server import ARGUMENTS, Server
from tests.behaviour.conftest import (
    CHUNK,
    as_prompts,
    ask,
    assert_all_true,
    assert_true_completion,
    make_params,
    random_prompt,
    running,
    scheduler_of,
)
from tests.real import PROJECT

if TYPE_CHECKING:
    from vllm import LLM
    from vllm.outputs import RequestOutput

pytestmark = pytest.mark.slow

# One worker on each of two cores.
BOTH_CORES = "0|1"
# Less and more than a chunk; the last prompt begins like the one before it.
LENGTHS = (1, 40, CHUNK, 3 * CHUNK + 5, 90, 7, 150, 2 * CHUNK)
PROMPTS = [random_prompt(i, n) for i, n in enumerate(LENGTHS)]
PROMPTS.append([*PROMPTS[-1][:CHUNK], *random_prompt(99, 30)])
MAX_TOKENS = 9
# The index of the prompt that declines.
SILENT = 1


@contextmanager
def workers(model: Path, **options: Any) -> Iterator[LLM]:
    """An engine in this process with its workers in their own; none may be left."""
    before = set(psutil.Process().children(recursive=True))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_CPU_OMP_THREADS_BIND", BOTH_CORES)
        with running(model, distributed_executor_backend="mp", **options) as llm:
            yield llm
    started = set(psutil.Process().children(recursive=True)) - before
    _, alive = psutil.wait_procs(started, timeout=120)
    # Python's own helper process stays.
    alive = [p for p in alive if "resource_tracker" not in " ".join(p.cmdline())]
    assert not alive


@pytest.fixture(scope="module", params=["tensor_parallel_size", "pipeline_parallel_size"])
def two_workers(model: Path, request: pytest.FixtureRequest) -> Iterator[LLM]:
    with workers(model, **{request.param: 2}) as llm:
        yield llm


def serving(model: Path, log: Path, *arguments: str, cores: str = BOTH_CORES) -> Server:
    return Server(
        model,
        log=log,
        args=["--enable-return-routed-experts", f"--max-num-batched-tokens={CHUNK}", *arguments],
        env={
            "VLLM_CPU_OMP_THREADS_BIND": cores,
            # Else v0.33.0 looks for a memory node for each data parallel rank.
            "VLLM_CPU_SIM_MULTI_NUMA": "0",
            # Else processes would use the address of a network card.
            "VLLM_HOST_IP": "127.0.0.1",
            "GLOO_SOCKET_IFNAME": "lo",
        },
    )


def generate(llm: LLM) -> list[RequestOutput]:
    each = [{"return_routed_experts": index != SILENT} for index in range(len(PROMPTS))]
    return ask(llm, *PROMPTS, each=each, max_tokens=MAX_TOKENS)


def ask_all(server: Server) -> list[Completion]:
    """All prompts at once, and then again from the prefix cache."""

    def complete(prompt: list[int]) -> Completion:
        return server.generate(prompt, max_tokens=MAX_TOKENS, ignore_eos=True)

    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        return [*pool.map(complete, PROMPTS), *pool.map(complete, PROMPTS)]


def assert_true(model: Path, answers: list[Completion]) -> None:
    for answer in answers:
        assert_true_completion(model, answer)


@contextmanager
def late(llm: LLM, rank: int, seconds: float) -> Iterator[None]:
    """Delay the start and the end of each step of this rank."""

    def slow_down(wrapper: Any) -> None:
        worker = wrapper.worker
        worker.late_steps, in_time = 0, worker.execute_model

        def execute_model(scheduler_output: Any) -> Any:
            worker.late_steps += 1
            time.sleep(seconds)
            output = in_time(scheduler_output)
            time.sleep(seconds)
            return output

        if worker.rank == rank:
            worker.execute_model = execute_model

    def speed_up(wrapper: Any) -> int:
        vars(wrapper.worker).pop("execute_model", None)
        return wrapper.worker.late_steps

    llm.collective_rpc(slow_down)
    yield
    late_steps = llm.collective_rpc(speed_up)
    assert [steps > 0 for steps in late_steps] == [rank == 0, rank == 1]


@pytest.mark.parametrize("rank", [0, 1])
def test_rank_that_is_late_changes_nothing(model: Path, two_workers: LLM, rank: int) -> None:
    """The other rank runs ahead as far as it can."""
    two_workers.reset_prefix_cache()
    in_time = generate(two_workers)
    cached = generate(two_workers)
    two_workers.reset_prefix_cache()
    with late(two_workers, rank, seconds=0.02):
        answers = generate(two_workers)
    tokens = [[o.outputs[0].token_ids for o in outputs] for outputs in (in_time, answers)]
    assert tokens[0] == tokens[1]
    assert not scheduler_of(two_workers).routed_experts.requests
    for outputs in (in_time, cached, answers):
        assert outputs.pop(SILENT).outputs[0].routed_experts is None
        assert_all_true(model, outputs)


def test_rows_of_two_ranks_are_true(model: Path, tmp_path: Path) -> None:
    with serving(model, tmp_path / "server.log", "--data-parallel-size=2") as server:
        assert_true(model, ask_all(server))
        metrics = server.get("/metrics")
    pattern = r'^vllm:routed_experts_rows_total{engine="(\d)".*} ([\d.e+]+)$'
    rows = re.findall(pattern, metrics, re.MULTILINE)
    assert {engine for engine, count in rows if float(count)} == {"0", "1"}


def test_rows_of_two_nodes_of_the_image_are_true(model: Path, tmp_path: Path) -> None:
    """The script of the image for nodes without Ray, each on an address of its own on loopback."""
    program = str(PROJECT.root / "deploy/image/dp-node.sh")
    port = str(free_port())

    def place(rank: int) -> dict[str, str]:
        return {
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "NODES": "2",
            "RANK": str(rank),
            "NODE": f"127.0.0.{2 + rank}",
            "HEAD": "127.0.0.2",
            "RPC_PORT": port,
            "VLLM_CPU_OMP_THREADS_BIND": str(rank),
            "GLOO_SOCKET_IFNAME": "lo",
        }

    arguments = ["--enable-return-routed-experts", f"--max-num-batched-tokens={CHUNK}"]
    second = [program, str(model), *ARGUMENTS, *arguments]
    with (
        Kept(second, tmp_path / "1.log", place(1)),
        Server(model, tmp_path / "0.log", arguments, place(0), program=[program]) as server,
    ):
        assert_true(model, ask_all(server))


def test_rows_of_a_pipeline_over_two_nodes_are_true(model: Path, tmp_path: Path) -> None:
    """Two nodes of one machine, which communicate through sockets."""
    arguments = [
        "--pipeline-parallel-size=2",
        "--nnodes=2",
        "--master-addr=127.0.0.1",
        f"--master-port={free_port()}",
    ]

    def node(rank: int, *more: str) -> Server:
        log = tmp_path / f"{rank}.log"
        return serving(model, log, *arguments, f"--node-rank={rank}", *more, cores=str(rank))

    first, second = node(0), node(1, "--headless")
    with Kept(second.command, second.log, second.env), first:
        answers = ask_all(first)
    assert_true(model, answers)


@pytest.mark.parametrize("feature", [True, False], ids=["on", "off"])
def test_engine_whose_worker_dies_ends_with_the_same_error(model: Path, feature: bool) -> None:
    with workers(model, tensor_parallel_size=2, enable_return_routed_experts=feature) as llm:
        engine = llm.llm_engine
        params = make_params(return_routed_experts=feature or None, max_tokens=400)
        engine.add_request("0", as_prompts(PROMPTS[0])[0], params)
        engine.step()
        executor = engine.engine_core.engine_core.model_executor
        os.kill(executor.workers[1].proc.pid, signal.SIGKILL)
        # The engine notices while it waits for the step, or before the next step. The other worker
        # may notice first.
        errors = r"^(cancelled|Executor failed\.|Worker failed with error .*)$"
        with pytest.raises(RuntimeError, match=errors):
            [engine.step() for _ in range(400)]
