# SPDX-License-Identifier: Apache-2.0
"""Every row that a client's trainer takes is the oracle's: `make clients`."""

from __future__ import annotations

import difflib
import importlib.metadata
import importlib.util
import os
import re
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from packaging.version import Version
from transformers import AutoModelForCausalLM

from examples.replay import replay
from harness import oracle
from harness.lines import LINES
from tests.clients.conftest import CLIENTS, RECIPES, ROOT, Answers, commands
from tests.clients.driving import OWN, read_record, refuse_error
from tests.clients.recorder import BEHAVIOURS, LINE

# The first one waits for three servers.
pytestmark = [pytest.mark.clients, pytest.mark.timeout(1800)]


def read_samples(folder: Path, behaviour: str) -> list[tuple[Any, Any]]:
    """What a client's program wrote."""
    refuse_error(folder, behaviour)
    with np.load(folder / f"{behaviour}.npz") as arrays:
        return [(arrays[f"tokens{i}"], arrays[f"routes{i}"]) for i in range(len(arrays.files) // 2)]


def count_true_rows(checkpoint: Path, samples: Sequence[tuple[Any, Any]]) -> int:
    """Compare every token but the last of each sample with the oracle; returns their number."""
    rows = 0
    assert samples
    for tokens, routes in samples:
        assert len(routes) == len(tokens)
        assert (routes[:-1] != OWN).all(), "a token that is trained has no row"
        truth = oracle.route(checkpoint, [int(t) for t in tokens])
        comparison = oracle.compare(routes[:-1], truth)
        assert comparison.agree == comparison.rows, str(comparison.disagreements[0])
        assert comparison.ties <= 1 + comparison.decisions // 1000
        rows += comparison.rows
    return rows


@pytest.mark.parametrize(
    ("client", "behaviour"), [(name, b) for name, client in CLIENTS.items() for b in client.asked]
)
def test_client_takes_the_oracles_rows(
    client: str,
    behaviour: str,
    answers: Answers,
    replayed: Callable[[str], Path],
    table: dict[tuple[str, str], str],
) -> None:
    """By its own code, also on rows of its own engine."""
    folder = replayed(client)
    table[client, behaviour] = "**wrong**"
    samples = read_samples(folder, behaviour)
    rows = count_true_rows(answers.checkpoints[BEHAVIOURS[behaviour]], samples)
    table[client, behaviour] = str(rows)


@pytest.mark.parametrize("behaviour", ["one turn", "smaller top-k", "300 experts"])
@torch.inference_mode()
def test_hugging_face_model_replays_rows_with_the_transformers_of_the_line(
    behaviour: str, answers: Answers
) -> None:
    checkpoint = answers.checkpoints[BEHAVIOURS[behaviour]]
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    refuse_error(answers.records, behaviour)
    (completion,) = read_record(answers.records / f"{behaviour}.json")[0].completions()
    tokens = torch.tensor([[*completion.prompt, *completion.token_ids][:-1]])
    own = model(tokens).logits
    for rows, same in ((completion.rows, True), (completion.rows[::-1].copy(), False)):
        routes = torch.from_numpy(rows.astype(np.int64))[None]
        with replay(model, routes, completion.moe_layers):
            assert torch.allclose(model(tokens).logits, own, atol=1e-4) == same


def test_recipe_for_verl_changes_two_lines(verl: Callable[[], Path]) -> None:
    name = "verl/workers/rollout/vllm_rollout/vllm_async_server.py"
    before = (CLIENTS["verl"].site / name).read_text().splitlines()
    after = (verl() / name).read_text().splitlines()
    changed = [n for n, lines in enumerate(zip(before, after, strict=True)) if lines[0] != lines[1]]
    limit, pause = changed
    assert after[limit].strip() == 'if _VLLM_VERSION < version.parse("0.20.2"):'
    assert "enable_rollout_routing_replay=True requires" in after[limit + 2]
    assert Version(importlib.metadata.version("vllm")) >= Version("0.20.2")
    assert after[pause - 1].strip() == "await self.engine.pause_generation("
    assert after[pause].strip() == 'mode="abort",'


def test_recipe_for_verl_wraps_the_engine_in_one_place(verl: Callable[[], Path]) -> None:
    _, _, command = commands("verl")
    server = verl() / "verl/workers/rollout/vllm_rollout/vllm_async_server.py"
    before = server.read_text()
    subprocess.run(
        ["bash", "-euc", command],
        cwd=ROOT / "examples" / "clients",
        env={**os.environ, "server": str(server)},
        check=True,
    )
    found = difflib.ndiff(before.splitlines(), server.read_text().splitlines())
    assert [line.split() for line in found if line[0] in "+-"] == [
        ["+", "from", ".resume", "import", "ResumingEngine"],
        ["-", "self.engine", "=", "engine_client"],
        ["+", "self.engine", "=", "ResumingEngine(engine_client)"],
    ]
    assert (server.parent / "resume.py").is_file()
    compile(server.read_text(), str(server), "exec")
    server.write_text(before)


def test_recipe_for_ms_swift_names_an_option_that_it_has() -> None:
    (option,) = set(re.findall(r"--(router_replay_mode) R3", RECIPES))
    found = CLIENTS["ms-swift"].site.glob("swift/megatron/arguments/*.py")
    assert any(f"{option}: Literal['disabled', 'R2', 'R3']" in file.read_text() for file in found)


def test_server_of_skyrl_wants_a_module_that_the_first_line_lacks() -> None:
    """When this fails, the recipe for SkyRL is to be changed."""
    (module,) = set(re.findall(r"`(vllm\.entrypoints\.launchers)`", RECIPES))
    assert (importlib.util.find_spec(module) is None) == (not LINES[LINE].tests["skyrl_server"])
    (file,) = CLIENTS["SkyRL"].site.glob("skyrl/**/vllm_server_actor.py")
    assert f"from {module}." in file.read_text()
