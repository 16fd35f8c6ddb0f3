# SPDX-License-Identifier: Apache-2.0
"""The recipe for TRL in TRL's own training loop, and the demo of a training run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from demos.train import FAULTS
from harness.process import free_port
from tests.clients.conftest import CLIENTS, HERE, ROOT

pytestmark = [pytest.mark.clients, pytest.mark.timeout(1800)]

# Of float32 log-probs that two shapes of the same batch give.
ROUNDING = 1e-4


@pytest.fixture(scope="module")
def passes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What TRL's trainer finds on random routes, by case of `passes_trl.py`."""
    folder = tmp_path_factory.mktemp("trl")
    python = CLIENTS["TRL"].site.parents[2] / "bin" / "python"
    for package in ("examples", "harness"):
        (folder / package).symlink_to(ROOT / package)
    env = {**os.environ, "PYTHONPATH": str(folder), "CUDA_VISIBLE_DEVICES": ""}
    make = "from harness.checkpoint import make_checkpoint as m; "
    make += "m('checkpoint', num_hidden_layers=2, moe_intermediate_size=32, router_std=0.125)"
    program = [str(HERE / "passes_trl.py"), str(folder / "checkpoint")]
    processes = ["-m", "torch.distributed.run", "--nproc_per_node=2", "--master_addr=127.0.0.1"]
    processes += [f"--master_port={free_port()}", *program, str(folder / "two.json"), "replay"]
    for command in (["-c", make], [*program, str(folder / "found.json")], processes):
        done = subprocess.run(
            [python, *command], cwd=folder, env=env, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr[-10_000:]
    found = json.loads((folder / "found.json").read_text())
    return {**found, "two processes": json.loads((folder / "two.json").read_text())["replay"]}


REPLAYED = [
    "replay",
    "checkpointed",
    "cut off",
    "padded to multiples",
    "two iterations",
    "two processes",
]


@pytest.mark.parametrize("case", REPLAYED)
def test_every_pass_of_trl_takes_the_rows(passes: dict[str, Any], case: str) -> None:
    """Also in shuffled and accumulated micro-batches with padding on both sides."""
    assert passes[case]["without gradients"] < ROUNDING
    assert passes[case]["with gradients"] < ROUNDING
    assert not passes[case]["wrappers left"]


def test_trainer_that_selects_itself_is_far_from_the_rows(passes: dict[str, Any]) -> None:
    own = passes["own"]
    assert own["without gradients"] > 0.1
    assert own["with gradients"] > 0.1
    assert own["own choice differs"] > 0.9


def test_backward_pass_that_computes_layers_again_takes_the_rows(passes: dict[str, Any]) -> None:
    wanted = pytest.approx(passes["replay"]["gradients"], rel=1e-4)
    assert passes["checkpointed"]["gradients"] == wanted
    assert passes["own"]["gradients"] != pytest.approx(passes["replay"]["gradients"], rel=0.05)


def test_rows_that_are_missing_stop_the_training(passes: dict[str, Any]) -> None:
    assert passes["rows missing"]["error"].startswith("ReplayError: sequence 0 of 20 tokens has")


def test_weights_are_not_sent_through_a_library_that_vllm_did_not_load(
    passes: dict[str, Any],
) -> None:
    assert passes["without NCCL"].startswith("vLLM could not load NCCL")


def train(out: Path, *options: str) -> tuple[int, str]:
    """The demo's exit status and what it printed."""
    assert CLIENTS["TRL"].site
    done = subprocess.run(
        [sys.executable, "-m", "demos.train", "--out", str(out), "--steps=2", *options],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
    )  # fmt: skip
    return done.returncode, done.stdout


def test_training_run_has_the_rows_of_the_weights_that_were_sent(tmp_path: Path) -> None:
    status, printed = train(tmp_path / "out")
    assert status == 0, printed
    assert "PASSED" in printed
    assert (tmp_path / "out" / "steps.png").stat().st_size > 20_000
    assert "own router" in (tmp_path / "out" / "record.md").read_text()


@pytest.mark.parametrize("fault", FAULTS)
def test_training_run_with_a_fault_fails(fault: str, tmp_path: Path) -> None:
    status, printed = train(tmp_path / "out", f"--break={fault}")
    assert status == 1, printed
    assert "rows are not those of the weights at step" in printed
