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
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import pytest

from benchmarks.common import table as markdown
from harness.lines import LINES
from harness.process import ENVIRONMENT
from tests.clients.recorder import BEHAVIOURS, LINE, MODELS, record
from tools.common.pin import Project
from tools.series.series import fingerprint, read_series

# Programs of other environments: this one cannot import them to look for tests.
collect_ignore_glob = [
    "run.py",
    "with_*.py",
    "engine_*.py",
    "passes_*.py",
    "pauses_*.py",
    "worker_*.py",
]

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
MADE = ROOT / "build" / "clients"

EACH = ("one turn", "prefix-cache hit", "smaller top-k", "300 experts")
WHOLE = (*EACH, "several turns, resent", "n > 1")
ABORTS = ("abort and resume", "abort without tokens")


@dataclass(frozen=True)
class Client:
    """A row of the table. `engine` is the class in which the client holds vLLM:
    `engine_<environment>.py` runs it in this environment, and the other module takes its answers
    instead of the server's."""

    asked: Sequence[str]  # the behaviours that the client has
    packages: tuple[str, ...]  # in the table; the first names environment, lock and `with_<it>.py`
    engine: str = ""
    part: str = ""  # of the client, whose program is `with_<part>.py`

    @property
    def environment(self) -> Path:
        return MADE / self.packages[0]

    @property
    def site(self) -> Path:
        """The packages of its environment."""
        for site in self.environment.glob("lib/python3*/site-packages"):
            return site
        pytest.skip(f"{self.packages[0]} is not installed: make clients")


SWIFT, VERL = ("ms-swift",), ("verl", "megatron-core")
ENGINES = ("one turn", "n > 1", "prefix-cache hit")
CLIENTS = {
    "megatron-core": Client(list(BEHAVIOURS), ("megatron-core",)),
    "ms-swift": Client(WHOLE, SWIFT),
    "ms-swift, its engine": Client(ENGINES, SWIFT, "GRPOVllmEngine"),
    "verifiers": Client((*EACH, "several turns"), ("verifiers", "renderers")),
    "verl": Client((*WHOLE, *ABORTS), VERL),
    "verl, its server": Client(
        (*ENGINES, "several turns, resent", "abort and resume"), VERL, "vLLMHttpServer"
    ),
    "verl, VeOmni": Client(
        tuple(b for b in WHOLE if b != "smaller top-k"), ("verl",), part="VeOmni"
    ),
    "TRL": Client(list(BEHAVIOURS), ("trl",)),
    "SkyRL": Client((*EACH, "several turns", "n > 1"), ("skyrl",)),
}
if LINES[LINE].tests["skyrl_server"]:
    CLIENTS["SkyRL, its server"] = Client((*ENGINES, "several turns"), ("skyrl",), "HTTP server")


class Answers(NamedTuple):
    """What the server answered."""

    records: Path  # a JSON file for each behaviour
    checkpoints: dict[str, Path]  # by key of `MODELS`


@pytest.fixture(scope="session")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Answers:
    folder = tmp_path_factory.mktemp("clients")
    records = folder / "records"
    checkpoints = {model: record(model, folder / model, records) for model in MODELS}
    return Answers(records, checkpoints)


@pytest.fixture(scope="session")
def run_program(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., None]:
    """Runs `run.py`, without a GPU."""
    # Not the whole repository: clients would take its vllm/ for the package.
    site = tmp_path_factory.mktemp("site")
    (site / "examples").symlink_to(ROOT / "examples")

    def run(
        python: Path | str, *arguments: Path | str, paths: Sequence[Path] = (), **env: str
    ) -> None:
        env["PYTHONPATH"] = os.pathsep.join(map(str, [site, *paths]))
        done = subprocess.run(
            [python, HERE / "run.py", *arguments],
            env={**os.environ, **env, "CUDA_VISIBLE_DEVICES": ""},
            capture_output=True,
            text=True,
            timeout=900,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-10_000:]

    return run


@pytest.fixture(scope="session")
def run_engine(
    run_program: Callable[..., None], verl: Callable[[], Path]
) -> Callable[[str, str, Path, Path], Path]:
    """Runs a client's own engine around the vLLM of this environment; the folder of its records."""

    def run(name: str, module: str, checkpoint: Path, folder: Path, **env: str) -> Path:
        client, line = CLIENTS[name], LINES[LINE]
        is_verl = client.packages is VERL
        run_program(
            sys.executable,
            module,
            checkpoint,
            folder / "records",
            client.site,
            paths=[*([verl()] if is_verl else []), *line.packages],
            **{**ENVIRONMENT, **line.environment, "TORCH_COMPILE_DISABLE": "1"},
            VLLM_CACHE_ROOT=str(folder / "cache"),
            RECIPE={"verl": commands("verl")[1], "skyrl": commands("SkyRL", "python")[0]}.get(
                client.packages[0], ""
            ),
            **env,
        )
        return folder / "records"

    return run


@pytest.fixture(scope="session")
def replayed(
    answers: Answers,
    run_program: Callable[..., None],
    run_engine: Callable[[str, str, Path, Path], Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[[str], Path]:
    """Runs a client's program, once; the folder with its results."""

    @functools.cache
    def replay(name: str) -> Path:
        client = CLIENTS[name]
        module = client.packages[0].replace("-", "_")
        folder = tmp_path_factory.mktemp(module)
        records = answers.records
        if client.engine:
            checkpoint = answers.checkpoints["dense-first"]
            records = run_engine(name, f"engine_{module}", checkpoint, folder)
        program = f"with_{(client.part or module).lower()}"
        run_program(client.environment / "bin/python", program, records, folder / "out")
        return folder / "out"

    return replay


RECIPES = (ROOT / "examples" / "clients" / "README.md").read_text(encoding="utf-8")


def commands(section: str, language: str = "sh") -> list[str]:
    """The blocks of a section of the recipes."""
    (text,) = re.findall(rf"^## {section}\n(.*?)(?=^## |\Z)", RECIPES, re.MULTILINE | re.DOTALL)
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="session")
def verl(tmp_path_factory: pytest.TempPathFactory) -> Callable[[], Path]:
    """Makes a folder with verl after the recipe's first command, once."""

    @functools.cache
    def make() -> Path:
        folder = tmp_path_factory.mktemp("verl")
        # Links: the command writes a new file.
        subprocess.run(["cp", "-rs", CLIENTS["verl"].site / "verl", folder], check=True)
        path = f"{MADE / 'verl' / 'bin'}{os.pathsep}{os.environ['PATH']}"
        env = {"PATH": path, "PYTHONPATH": str(folder)}
        subprocess.run(["bash", "-euc", commands("verl")[0]], env=env, check=True)
        return folder

    return make


@pytest.fixture(scope="session")
def table() -> Iterator[dict[tuple[str, str], str]]:
    """Cells by client and behaviour, written at the end to build/clients/clients.md."""
    cells: dict[tuple[str, str], str] = {}
    yield cells
    MADE.mkdir(parents=True, exist_ok=True)
    (MADE / "clients.md").write_text(as_markdown(cells))


def as_markdown(cells: dict[tuple[str, str], str]) -> str:
    project = Project(ROOT, LINE)
    series = read_series(project.series_file)
    of = fingerprint(series, project.pin)[:16]
    command = f"make clients ON={LINE}"
    rows = [
        [
            label(name),
            *(
                cells.get((name, behaviour), "not run") if behaviour in client.asked else "–"
                for behaviour in BEHAVIOURS
            ),
        ]
        for name, client in CLIENTS.items()
    ]
    return "\n".join(
        [
            "# Clients\n",
            f"`{command}`, {datetime.date.today()}, on a CPU: vLLM "
            f"{importlib.metadata.version('vllm')}, series of {len(series)} patches (`{of}`). "
            "A number counts the rows that a trainer takes. All of them equal the router of "
            "Hugging Face `transformers`, in float32. – means that the client does not do this.\n",
            markdown(["Client", *BEHAVIOURS], rows),
        ]
    )


def label(name: str) -> str:
    """A client with its locked versions."""
    client = CLIENTS[name]
    if client.engine:
        return f"the same, rows of its own {client.engine}"
    lock = (ROOT / "requirements" / f"clients-{client.packages[0]}.in").read_text()
    versions = dict(re.findall(r"^(\S+)==(\S+)$", lock, re.MULTILINE))
    named = [f"{package} {versions[package]}" for package in client.packages]
    return ", ".join([*named, *([f"its {client.part} replay"] if client.part else [])])
