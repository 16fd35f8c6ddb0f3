# SPDX-License-Identifier: Apache-2.0
"""Every row that a client's trainer takes is the oracle's: `make clients`."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from packaging.version import Version

from harness.lines import FIRST
from tests.clients import rules
from tests.clients.conftest import (
    BROKEN,
    CLIENTS,
    ENGINES,
    ENGINES_CANNOT,
    MADE,
    RECIPES,
    Answers,
    packages_of,
    why_not,
)
from tests.clients.recorder import BEHAVIOURS, LINE

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
    if reason := why_not(client, behaviour):
        table[client, behaviour] = "–"
        pytest.skip(f"{client} {reason}")
    folder = replayed(client)
    table[client, behaviour] = "**wrong**"
    rows = answers.count_true_rows(behaviour, read_samples(folder, behaviour))
    table[client, behaviour] = str(rows)


@pytest.mark.parametrize(
    ("client", "behaviour"),
    [(client, behaviour) for client, (_, asked) in ENGINES.items() for behaviour in asked],
)
def test_own_engine_returns_the_oracles_rows_to_own_code(
    client: str,
    behaviour: str,
    answers: Answers,
    replayed_by_engine: Callable[[str], Path],
    table: Cells,
) -> None:
    cell = f"{client}, engine", behaviour
    if reason := ENGINES_CANNOT.get((LINE, client, behaviour)):
        pytest.skip(reason)
    table[cell] = "**wrong**"
    samples = read_samples(replayed_by_engine(client), behaviour)
    table[cell] = str(answers.count_true_rows(behaviour, samples))


@pytest.mark.parametrize("behaviour", BEHAVIOURS)
@pytest.mark.parametrize("client", rules.RULES)
def test_rule_of_a_client_that_cannot_be_installed_takes_the_oracles_rows(
    client: str, behaviour: str, answers: Answers, table: Cells
) -> None:
    if reason := why_not(client, behaviour):
        table[client, behaviour] = "–"
        pytest.skip(f"{client} {reason}")
    table[client, behaviour] = "**wrong**"
    rows = answers.count_true_rows(behaviour, rules.RULES[client](answers.turns(behaviour)))
    table[client, behaviour] = str(rows)


@pytest.mark.parametrize("rule", BROKEN)
def test_broken_rule_of_the_server_is_noticed(
    rule: str, answers: Answers, replayed: Callable[[str], Path], table: Cells
) -> None:
    behaviour, _, client, found = BROKEN[rule]
    if reason := why_not(client, behaviour):
        table[client, rule] = "–"
        pytest.skip(f"{client} {reason}")
    folder = replayed(client)
    table[client, rule] = "**nothing**"
    with pytest.raises(AssertionError, match=found):
        answers.count_true_rows(rule, read_samples(folder, rule))
    table[client, rule] = found


def test_recipe_for_verl_moves_the_limit_of_routing_replay_alone(verl: Path) -> None:
    name = "verl/workers/rollout/vllm_rollout/vllm_async_server.py"
    before = (packages_of("verl") / name).read_text().splitlines()
    after = (verl / name).read_text().splitlines()
    changed = [n for n, lines in enumerate(zip(before, after, strict=True)) if lines[0] != lines[1]]
    assert [after[n].strip() for n in changed] == ['if _VLLM_VERSION < version.parse("0.20.2"):']
    assert "enable_rollout_routing_replay=True requires" in after[changed[0] + 2]
    assert Version(importlib.metadata.version("vllm")) >= Version("0.20.2")


def test_recipe_for_ms_swift_names_an_option_that_it_has() -> None:
    (option,) = set(re.findall(r"--(router_replay_mode) R3", RECIPES))
    found = packages_of("ms-swift").glob("swift/megatron/arguments/*.py")
    assert any(f"{option}: Literal['disabled', 'R2', 'R3']" in file.read_text() for file in found)


@pytest.mark.skipif(LINE != FIRST, reason="of the first line")
def test_server_of_skyrl_wants_a_module_that_this_vllm_lacks() -> None:
    """When this fails, the recipe for SkyRL is to be changed."""
    (module,) = set(re.findall(r"`(vllm\.entrypoints\.launchers)`", RECIPES))
    assert importlib.util.find_spec(module) is None
    for file in MADE.glob("skyrl/lib/python3*/site-packages/skyrl/**/vllm_server_actor.py"):
        assert f"from {module}." in file.read_text()
