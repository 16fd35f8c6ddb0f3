# SPDX-License-Identifier: Apache-2.0
"""Engines of the installed wheel on small random checkpoints, and their oracle.

Engines run in this process and start in a second after vLLM is imported. Requests that must not hit
each other's cached prefixes use different prompts.
"""

from __future__ import annotations

import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from examples.client import Completion
from harness import oracle
from harness.checkpoint import make_checkpoint
from harness.lines import LINES, installed
from harness.process import ENVIRONMENT

if TYPE_CHECKING:
    from vllm import LLM, SamplingParams
    from vllm.outputs import CompletionOutput, RequestOutput

CHUNK = 64
BLOCK = 32

# The engine's options; each test module adds what it is about.
OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": 512,
    "max_num_batched_tokens": CHUNK,
    "max_num_seqs": 8,
    "block_size": BLOCK,
    "kv_cache_memory_bytes": 64 << 20,
    "enable_prefix_caching": True,
    "enable_return_routed_experts": True,
    "seed": 0,
}

# Marks of modules whose tests run engines.
ENGINES = [pytest.mark.slow] if LINES[installed()].tests["slow_engines"] else []

AMX_PLUGIN = """
import torch

def pretend():
    torch.cpu._is_amx_tile_supported = lambda: {has_amx}
    print("The CPU has AMX: {has_amx}")
"""


def terminate_elsewhere(context: Any) -> None:
    """`zmq.Context.__del__` that does not wait in the thread of the garbage collector.

    Queues of a deleted engine may be garbage in a cycle. The collector may reach a context before
    its sockets, and the context would wait forever for them to be closed.
    """
    if not context._shadow and not context.closed:
        threading.Thread(target=context.term, daemon=True).start()


@pytest.fixture(scope="session", autouse=True)
def environment() -> Iterator[None]:
    """Variables and patches for every vLLM of the tests. The engine core stays in this process, so
    that a failure shows its traceback."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("zmq.Context.__del__", terminate_elsewhere)
        for name, value in {**ENVIRONMENT, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}.items():
            patch.setenv(name, value)
        # A worker that ends synchronizes the GPU, which fails without one.
        patch.setattr("torch.accelerator.synchronize", lambda: None)
        # A worker disables this function for its whole process.
        patch.setattr("torch.set_num_threads", torch.set_num_threads)
        # vLLM inspects a model class in another process, to keep CUDA out of this one.
        registry = "vllm.model_executor.models.registry"
        patch.setattr(f"{registry}._run_in_subprocess", lambda look: look())
        yield


@pytest.fixture(scope="session")
def model(checkpoint: Callable[..., Path]) -> Path:
    """A small Qwen3-MoE of four layers, the second one dense."""
    return checkpoint(mlp_only_layers=[1])


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Makes a checkpoint of a family, once per setting."""
    folder = tmp_path_factory.mktemp("checkpoints")

    def make(family: str = "qwen3_moe", **overrides: Any) -> Path:
        # vLLM uses glob with the folder: no brackets in its name.
        name = re.sub(r"\W+", "-", f"{family} {sorted(overrides.items())}").strip("-")
        return make_checkpoint(folder / name, family, **overrides)

    return make


# Models of the engines in this process.
_running: list[Path] = []


@contextmanager
def running(model: Path, **options: Any) -> Iterator[LLM]:
    """Run an engine, and remove it at the end of the block.

    Its worker runs in this process. With `distributed_executor_backend="mp"`, as in `vllm serve`,
    workers are separate processes.
    """
    from vllm import LLM, envs
    from vllm.v1.executor.uniproc_executor import UniProcExecutor

    # vLLM caches the values of variables: clear those of an earlier engine.
    envs.disable_envs_cache()
    in_process = {"distributed_executor_backend": UniProcExecutor}
    with ExitStack() as stack:
        _running.append(model)
        stack.callback(forget_engine, model)
        llm = LLM(str(model), **{**OPTIONS, **LINES[installed()].engine, **in_process, **options})
        stack.callback(llm.llm_engine.engine_core.shutdown)
        yield llm


def forget_engine(model: Path) -> None:
    """Remove what engines of this process share, when the last one has ended."""
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    _running.remove(model)
    if not _running:
        cleanup_dist_env_and_memory()


def run_module(module: str, out: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Run a program of the repository to its end."""
    return subprocess.run(
        [sys.executable, "-m", module, "--out", str(out), *options],
        cwd=Path(__file__).parents[2],
        text=True,
        capture_output=True,
        timeout=840,
        check=False,
    )


def pretend_amx(folder: Path, has_amx: bool) -> None:
    """Write a plugin of vLLM into ``folder``. With the folder on PYTHONPATH, every process of vLLM
    believes what ``has_amx`` says of the CPU."""
    package = folder / "amx-0.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: amx\nVersion: 0\n")
    (package / "entry_points.txt").write_text("[vllm.general_plugins]\namx = amx:pretend\n")
    (folder / "amx.py").write_text(AMX_PLUGIN.format(has_amx=has_amx))


def random_prompt(seed: int, length: int) -> list[int]:
    """Token ids without the special ones."""
    return [int(t) for t in np.random.default_rng(seed).integers(4, 700, length)]


def as_prompts(*prompts: list[int]) -> list[dict[str, list[int]]]:
    return [{"prompt_token_ids": prompt} for prompt in prompts]


def make_params(**sampling: Any) -> SamplingParams:
    """Six tokens, greedily, unless `sampling` says otherwise."""
    from vllm import SamplingParams

    return SamplingParams(**{"temperature": 0.0, "ignore_eos": True, "max_tokens": 6, **sampling})


def ask(
    llm: LLM,
    *prompts: Any,
    each: Sequence[Mapping[str, Any]] | None = None,
    lora: Any = None,
    **sampling: Any,
) -> list[RequestOutput]:
    """Complete prompts (ids, or vLLM's own dictionaries) at once. `sampling` are fields of all
    `SamplingParams`, `each` of one prompt's alone."""
    given = [p if isinstance(p, dict) else {"prompt_token_ids": p} for p in prompts]
    params = [make_params(**{**sampling, **own}) for own in each or [{}] * len(prompts)]
    return llm.generate(given, params, use_tqdm=False, lora_request=lora)


def scheduler_of(llm: LLM) -> Any:
    return llm.llm_engine.engine_core.engine_core.scheduler


def caches(llm: LLM) -> bool:
    return bool(llm.llm_engine.vllm_config.cache_config.enable_prefix_caching)


def assert_rows(model: Path, tokens: Sequence[int], rows: npt.NDArray[Any], start: int = 0) -> None:
    """Every position from `start` on but the last has the oracle's row."""
    assert len(rows) == len(tokens) - 1 - start
    comparison = oracle.compare(rows, oracle.route(model, tokens), start)
    assert comparison.agree == comparison.rows, comparison.disagreements[0]
    # Agreement means little if ties are common. A few may occur in any sequence.
    assert comparison.ties <= 1 + comparison.decisions // 200


def assert_true_completion(model: Path, completion: Completion, start: int = 0) -> None:
    """A completion of a server has the oracle's rows from `start` on."""
    tokens = [*completion.prompt, *completion.token_ids]
    assert completion.start == start
    assert completion.moe_layers == oracle.route(model, tokens).layers
    assert_rows(model, tokens, completion.rows, start)


def assert_true_rows(
    model: Path, prompt: list[int], completion: CompletionOutput, start: int = 0
) -> None:
    """Every position of prompt and output but the last has the oracle's row."""
    tokens = [*prompt, *completion.token_ids]
    assert completion.routed_experts is not None
    assert completion.routed_experts_start == start
    assert completion.num_prompt_tokens == len(prompt)
    assert tuple(completion.moe_layers) == oracle.route(model, tokens).layers
    assert_rows(model, tokens, completion.routed_experts, start)


def assert_all_true(model: Path, outputs: list[RequestOutput]) -> None:
    for output in outputs:
        for completion in output.outputs:
            assert_true_rows(model, list(output.prompt_token_ids or ()), completion)
