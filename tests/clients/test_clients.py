# SPDX-License-Identifier: Apache-2.0
"""Every row that a client's trainer takes is the oracle's: `make clients`."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from packaging.version import Version

from tests.clients import rules
from tests.clients.conftest import BROKEN, CLIENTS, MADE, ROOT, RULES_NEVER, Answers
from tests.clients.recorder import BEHAVIOURS

# The first one waits for three servers.
pytestmark = [pytest.mark.clients, pytest.mark.timeout(1800)]

Cells = dict[tuple[str, str], str]


def read_samples(folder: Path, behaviour: str) -> list[tuple[Any, Any]]:
    """What a client's program wrote."""
    error = folder / f"{behaviour}.error"
    assert not error.exists(), error.read_text()
    with np.load(folder / f"{behaviour}.npz") as arrays:
        return [(arrays[f"tokens{i}"], arrays[f"routes{i}"]) for i in range(len(arrays.files) // 2)]


@pytest.mark.parametrize("behaviour", BEHAVIOURS)
@pytest.mark.parametrize("client", CLIENTS)
def test_own_code_takes_the_oracles_rows(
    client: str,
    behaviour: str,
    answers: Answers,
    replayed: Callable[[str], Path],
    table: Cells,
) -> None:
    if reason := CLIENTS[client].never.get(behaviour):
        table[client, behaviour] = "–"
        pytest.skip(f"{client} {reason}")
    folder = replayed(client)
    table[client, behaviour] = "**wrong**"
    rows = answers.count_true_rows(behaviour, read_samples(folder, behaviour))
    table[client, behaviour] = str(rows)


@pytest.mark.parametrize("behaviour", BEHAVIOURS)
@pytest.mark.parametrize("client", rules.RULES)
def test_rule_of_a_client_that_cannot_be_installed_takes_the_oracles_rows(
    client: str, behaviour: str, answers: Answers, table: Cells
) -> None:
    if reason := RULES_NEVER[client].get(behaviour):
        table[client, behaviour] = "–"
        pytest.skip(f"{client} {reason}")
    table[client, behaviour] = "**wrong**"
    rows = answers.count_true_rows(behaviour, rules.RULES[client](answers.turns(behaviour)))
    table[client, behaviour] = str(rows)


@pytest.mark.parametrize("rule", BROKEN)
def test_broken_rule_of_the_server_is_noticed(
    rule: str, answers: Answers, replayed: Callable[[str], Path], table: Cells
) -> None:
    _, _, client, found = BROKEN[rule]
    folder = replayed(client)
    table[client, rule] = "**nothing**"
    with pytest.raises(AssertionError, match=found):
        answers.count_true_rows(rule, read_samples(folder, rule))
    table[client, rule] = found


RECIPES = (ROOT / "examples" / "clients" / "README.md").read_text(encoding="utf-8")


def commands(section: str) -> list[str]:
    """The shell blocks of a section of the recipes."""
    (text,) = re.findall(rf"^## {section}\n(.*?)(?=^## |\Z)", RECIPES, re.MULTILINE | re.DOTALL)
    return re.findall(r"^```sh\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def verl() -> Path:
    """The environment of verl."""
    environment = MADE / "verl"
    if not environment.exists():
        pytest.skip("verl is not installed: make clients")
    return environment


def test_recipe_for_verl_moves_the_limit_of_routing_replay_alone(
    verl: Path, tmp_path: Path
) -> None:
    name = "verl/workers/rollout/vllm_rollout/vllm_async_server.py"
    (source,) = verl.glob(f"lib/python3*/site-packages/{name}")
    copy = tmp_path / name
    copy.parent.mkdir(parents=True)
    shutil.copy(source, copy)
    (tmp_path / "verl" / "__init__.py").touch()
    path = f"{verl / 'bin'}{os.pathsep}{os.environ['PATH']}"
    environment = {"PATH": path, "PYTHONPATH": str(tmp_path)}
    subprocess.run(["bash", "-euc", commands("verl")[0]], env=environment, check=True)
    before, after = source.read_text().splitlines(), copy.read_text().splitlines()
    changed = [n for n, lines in enumerate(zip(before, after, strict=True)) if lines[0] != lines[1]]
    assert [after[n].strip() for n in changed] == ['if _VLLM_VERSION < version.parse("0.20.2"):']
    assert "enable_rollout_routing_replay=True requires" in after[changed[0] + 2]
    assert Version(importlib.metadata.version("vllm")) >= Version("0.20.2")


def test_recipe_for_verl_sets_options_that_it_has(verl: Path) -> None:
    command = commands("verl")[1]
    options = re.findall(r"(actor_rollout_ref\S+=\S+)", command)
    assert len(options) == 3
    (name,) = re.findall(r"--config-name (\S+)", command)
    (config,) = verl.glob(f"lib/python3*/site-packages/verl/trainer/config/_generated_{name}.yaml")
    program = (
        "import sys; from omegaconf import OmegaConf; config = OmegaConf.load(sys.argv[1]); "
        "OmegaConf.set_struct(config, True); config.merge_with_dotlist(sys.argv[2:])"
    )
    subprocess.run([verl / "bin" / "python", "-c", program, config, *options], check=True)


def test_recipe_for_ms_swift_names_an_option_that_it_has() -> None:
    (option,) = set(re.findall(r"--(router_replay_mode) R3", RECIPES))
    found = [*MADE.glob("ms-swift/lib/python3*/site-packages/swift/megatron/arguments/*.py")]
    if not found:
        pytest.skip("ms-swift is not installed: make clients")
    assert any(f"{option}: Literal['disabled', 'R2', 'R3']" in file.read_text() for file in found)


def test_server_of_skyrl_wants_a_module_that_this_vllm_lacks() -> None:
    """When this fails, the recipe for SkyRL is to be changed."""
    (module,) = set(re.findall(r"`(vllm\.entrypoints\.launchers)`", RECIPES))
    assert importlib.util.find_spec(module) is None
    for file in MADE.glob("skyrl/lib/python3*/site-packages/skyrl/**/vllm_server_actor.py"):
        assert f"from {module}." in file.read_text()
