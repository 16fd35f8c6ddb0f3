# SPDX-License-Identifier: Apache-2.0
"""Clients' own code on answers of a running patched server (`make clients`).

Server and oracle run in this environment, each client in one of its own, from its own lock, without
vLLM. Recorded answers go there as files, and what a trainer would take comes back.
"""

from __future__ import annotations

import datetime
import functools
import importlib.metadata
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from examples.client import decode_rows
from harness import oracle
from harness.lines import FIRST, LINES
from harness.process import ENVIRONMENT
from tests.clients import rules
from tests.clients.driving import OWN, Routes, Turn, encode, read_record, write_record
from tests.clients.recorder import BEHAVIOURS, LINE, MODELS, NOT_YET, record, recorded

# Programs of other environments: this one cannot import them to look for tests.
collect_ignore_glob = ["with_*.py", "engine_*.py"]

ROOT = Path(__file__).resolve().parents[2]
MADE = ROOT / "build" / "clients"

RESENDS = "asks for all rows in each turn"
CONTINUES = "asks for new rows alone"
WHOLE = "does not stream"
NO_RESUME = "drops what was aborted"
UNSTATED = (
    "Answers of this line do not state `routed_experts_start`, `num_prompt_tokens` and "
    "`moe_layers`. The caller knows them by its request and its model; they were added here."
)
ALONE = "sends a request for each sample"


@dataclass(frozen=True)
class Client:
    """A client with its own code.

    Attributes:
        environment: in build/clients, locked by requirements/clients-<environment>.txt.
        packages: distributions whose versions the table states.
        program: in this folder.
        never: behaviours that the client does not have, with the reason.
    """

    environment: str
    packages: tuple[str, ...]
    program: str
    never: dict[str, str] = field(default_factory=dict)


ABORTS = ("abort and resume", "abort without tokens")
CLIENTS = {
    "megatron-core": Client("megatron-core", ("megatron-core",), "with_megatron.py"),
    "ms-swift": Client(
        "ms-swift",
        ("ms-swift",),
        "with_ms_swift.py",
        {"several turns": RESENDS, "stream": WHOLE, **dict.fromkeys(ABORTS, NO_RESUME)},
    ),
    "verifiers": Client(
        "verifiers",
        ("verifiers", "renderers"),
        "with_verifiers.py",
        {
            "several turns, resent": CONTINUES,
            "n > 1": ALONE,
            "stream": WHOLE,
            **dict.fromkeys(ABORTS, NO_RESUME),
        },
    ),
    "verl": Client(
        "verl",
        ("verl", "megatron-core"),
        "with_verl.py",
        {"several turns": RESENDS, "stream": WHOLE},
    ),
    "SkyRL": Client(
        "skyrl",
        ("skyrl",),
        "with_skyrl.py",
        {
            "several turns, resent": CONTINUES,
            "stream": WHOLE,
            **dict.fromkeys(ABORTS, NO_RESUME),
        },
    ),
}
# Clients whose own engine or rollout server runs too, around the vLLM of this environment, by the
# program `engine_<environment>.py`; and what it is asked.
ENGINES = {
    "ms-swift": ("GRPOVllmEngine", ("one turn", "n > 1", "prefix-cache hit")),
    "verl": (
        "vLLMHttpServer",
        ("one turn", "several turns, resent", "n > 1", "abort and resume", "prefix-cache hit"),
    ),
}
# By line, client and behaviour: what an engine cannot do.
ENGINES_CANNOT = {
    (
        "v0.33.0",
        "verl",
        "abort and resume",
    ): "verl 0.9.1 pauses with an argument that vLLM 0.33.0 does not have"
}
# By rule alone.
RULES_NEVER: dict[str, dict[str, str]] = {
    "vime": {"several turns": RESENDS, "stream": WHOLE},
    "NeMo-RL": {"several turns": RESENDS, "stream": WHOLE, **dict.fromkeys(ABORTS, NO_RESUME)},
    "prime-rl": CLIENTS["verifiers"].never,
    "slime": {"several turns": RESENDS, "stream": WHOLE},
    "AReaL": {"several turns": RESENDS, "stream": WHOLE},
    "ROLL": {"several turns": RESENDS, "stream": WHOLE},
}


def without_last_row(turns: list[Turn]) -> None:
    choice = turns[0].chunks[0]["choices"][0]
    choice["routed_experts"] = encode(decode_rows(choice["routed_experts"])[:-1])


def without_start(turns: list[Turn]) -> None:
    for turn in turns:
        turn.chunks[0]["choices"][0]["routed_experts_start"] = 0


def without_top_k(turns: list[Turn]) -> None:
    del turns[0].chunks[0]["choices"][0]["moe_top_k"]


# Rules that the server keeps, broken: from which record, how, which client must notice, and what
# is then found.
BROKEN: dict[str, tuple[str, Callable[[list[Turn]], None], str, str]] = {
    "a row short at the abort": ("abort and resume", without_last_row, "verl", "disagrees"),
    "start not stated": ("several turns", without_start, "verifiers", "no rows for some message"),
    "ids repeated": ("smaller top-k", without_top_k, "megatron-core", "too few experts"),
}


@dataclass(frozen=True)
class Answers:
    """What the server answered.

    Attributes:
        folder: a JSON file for each behaviour, and for each broken rule.
        checkpoints: by key of `MODELS`.
    """

    folder: Path
    checkpoints: dict[str, Path]

    def turns(self, behaviour: str) -> list[Turn]:
        return read_record(self.folder / f"{behaviour}.json")

    def count_true_rows(self, behaviour: str, samples: list[tuple[Any, Routes]]) -> int:
        """Compare every token but the last of each sample with the oracle; returns their number.

        Raises:
            AssertionError: a row that is missing or another one than the oracle's.
        """
        source = BROKEN[behaviour][0] if behaviour in BROKEN else behaviour
        checkpoint = self.checkpoints[BEHAVIOURS[source][0]]
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


@pytest.fixture(scope="session")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Answers:
    folder = tmp_path_factory.mktemp("clients")
    records = folder / "records"
    checkpoints = {
        model: record(model, folder / model, records) for model in MODELS if recorded(model)
    }
    for name, (source, damage, _, _) in BROKEN.items():
        if source in NOT_YET.get(LINE, {}):
            continue
        turns = read_record(records / f"{source}.json")
        damage(turns)
        write_record(records, name, turns)
    return Answers(records, checkpoints)


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """For PYTHONPATH. Not the whole repository: clients would take its vllm/ for the package."""
    site = tmp_path_factory.mktemp("site")
    (site / "examples").symlink_to(ROOT / "examples")
    return site


def replay_in(client: str, records: Path, out: Path, site: Path) -> None:
    """Run a client's program in its environment."""
    python = MADE / CLIENTS[client].environment / "bin" / "python"
    program = Path(__file__).with_name(CLIENTS[client].program)
    run_program([python, "-W", "ignore", program, records, out], {"PYTHONPATH": str(site)})


def run_program(command: Sequence[Path | str], env: dict[str, str]) -> None:
    """Run a program without a GPU; raises AssertionError with what it said if it fails."""
    done = subprocess.run(
        command,
        env={**os.environ, **env, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-10_000:]


@pytest.fixture(scope="session")
def replayed(
    answers: Answers, site: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Path]:
    """Runs a client's program on the server's answers, once; the folder with its results."""

    @functools.cache
    def run(name: str) -> Path:
        packages_of(name)
        out = tmp_path_factory.mktemp(CLIENTS[name].environment)
        replay_in(name, answers.folder, out, site)
        return out

    return run


@pytest.fixture(scope="session")
def replayed_by_engine(
    answers: Answers,
    site: Path,
    tmp_path_factory: pytest.TempPathFactory,
    request: pytest.FixtureRequest,
) -> Callable[[str], Path]:
    """Runs a client's engine, and its program on what it returned, once."""

    @functools.cache
    def run(name: str) -> Path:
        packages = packages_of(name)
        folder = tmp_path_factory.mktemp("engine")
        records, out = folder / "records", folder / "out"
        records.mkdir()
        out.mkdir()
        environment = CLIENTS[name].environment.replace("-", "_")
        program = Path(__file__).with_name(f"engine_{environment}.py")
        env = {
            **ENVIRONMENT,
            **LINES[LINE].variables(),
            "TORCH_COMPILE_DISABLE": "1",
            "VLLM_CACHE_ROOT": str(folder / "cache"),
            "RECIPE": commands("verl")[1],
        }
        paths = [site, *([request.getfixturevalue("verl")] if name == "verl" else [])]
        rest = filter(None, [env.get("PYTHONPATH")])
        env["PYTHONPATH"] = os.pathsep.join([*map(str, paths), *rest])
        checkpoint = answers.checkpoints["dense-first"]
        run_program([sys.executable, "-W", "ignore", program, checkpoint, records, packages], env)
        replay_in(name, records, out, site)
        return out

    return run


def packages_of(client: str) -> Path:
    """The packages of a client's environment."""
    for packages in (MADE / CLIENTS[client].environment).glob("lib/python3*/site-packages"):
        return packages
    pytest.skip(f"{client} is not installed: make clients")


RECIPES = (ROOT / "examples" / "clients" / "README.md").read_text(encoding="utf-8")


def commands(section: str, language: str = "sh") -> list[str]:
    """The blocks of a section of the recipes."""
    (text,) = re.findall(rf"^## {section}\n(.*?)(?=^## |\Z)", RECIPES, re.MULTILINE | re.DOTALL)
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="session")
def verl(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with verl after the recipe's first command."""
    packages = packages_of("verl")
    folder = tmp_path_factory.mktemp("verl")
    # Links: the command writes a new file.
    subprocess.run(["cp", "-rs", packages / "verl", folder / "verl"], check=True)
    path = f"{MADE / 'verl' / 'bin'}{os.pathsep}{os.environ['PATH']}"
    env = {"PATH": path, "PYTHONPATH": str(folder)}
    subprocess.run(["bash", "-euc", commands("verl")[0]], env=env, check=True)
    return folder


def why_not(client: str, behaviour: str) -> str | None:
    """Why a client's cell of a behaviour has no number, if it has none."""
    never = {**{name: client.never for name, client in CLIENTS.items()}, **RULES_NEVER}
    if never[client] is CLIENTS["verifiers"].never and not LINES[LINE].states_place:
        return "reads `routed_experts_start`, which answers of this line do not state"
    return never[client].get(behaviour) or NOT_YET.get(LINE, {}).get(behaviour)


@pytest.fixture(scope="session")
def table() -> Iterator[dict[tuple[str, str], str]]:
    """Cells by client and behaviour, written at the end to build/clients/clients.md."""
    cells: dict[tuple[str, str], str] = {}
    yield cells
    (MADE / "clients.md").write_text(as_markdown(cells))


def as_markdown(cells: dict[tuple[str, str], str]) -> str:
    series = (ROOT / "patches" / LINE / "series").read_text().split()
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True
    ).stdout.strip()
    command = "make clients" if LINE == FIRST else f"make clients ON={LINE}"
    head = ["Client", *BEHAVIOURS]
    names = [*CLIENTS, *rules.RULES]
    lines = [
        "# Clients",
        "",
        f"`{command}`, {datetime.date.today()}, on a CPU: vLLM "
        f"{importlib.metadata.version('vllm')}, series of {len(series)} patches (`{commit}`). Rows "
        "that a trainer takes and that equal the router of Hugging Face `transformers`, float32; "
        "a number stands for all rows of the case. – means that the client does not do this.",
        *([] if LINES[LINE].states_place else ["", UNSTATED]),
        "",
        "| " + " | ".join(head) + " |",
        "| " + " | ".join("---" for _ in head) + " |",
    ]
    for name in names:
        row = [cells.get((name, behaviour), "not run") for behaviour in BEHAVIOURS]
        lines.append("| " + " | ".join([label(name), *row]) + " |")
        if name in ENGINES:
            row = [cells.get((f"{name}, engine", behaviour), "–") for behaviour in BEHAVIOURS]
            lines.append(f"| the same, rows of its own {ENGINES[name][0]} | {' | '.join(row)} |")
    broken = [cells.get((of, rule), "not run") for rule, (_, _, of, _) in BROKEN.items()]
    lines += [
        "",
        "With a rule of the server broken in the recorded answers:",
        "",
        "| Rule broken | Client | Found |",
        "| --- | --- | --- |",
        *(
            f"| {rule} | {of} | {found} |"
            for (rule, (_, _, of, _)), found in zip(BROKEN.items(), broken, strict=True)
        ),
        "",
        "Why a cell has no number:",
        "",
    ]
    for name in names:
        reasons: dict[str, list[str]] = {}
        for behaviour in BEHAVIOURS:
            if reason := why_not(name, behaviour):
                reasons.setdefault(reason, []).append(behaviour)
        said = "; ".join(f"{reason} ({', '.join(of)})" for reason, of in reasons.items())
        if said:
            lines.append(f"- {name}: {said}.")
    lines.append("- Engines: their programs here ask for the behaviours with a number alone.")
    lines += [
        f"- {client}'s engine: {reason} ({behaviour})."
        for (line, client, behaviour), reason in ENGINES_CANNOT.items()
        if line == LINE
    ]
    return "\n".join(lines) + "\n"


def label(name: str) -> str:
    """A client with its versions, read in its environment."""
    if name not in CLIENTS:
        return f"{name}, by its rule"
    client = CLIENTS[name]
    (site,) = (MADE / client.environment / "lib").glob("python3*/site-packages")
    found = importlib.metadata.distributions(path=[str(site)])
    versions = {d.metadata["Name"].lower().replace("_", "-"): d.version for d in found}
    return ", ".join(f"{package} {versions[package]}" for package in client.packages)
