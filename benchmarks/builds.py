# SPDX-License-Identifier: Apache-2.0
"""Builds of vLLM that lie side by side, and processes that run with one of them."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

ROOT = Path(__file__).resolve().parents[1]
KEEPER = ROOT / "examples/demo/keeper.py"
FLAGS = ("off", "on", "opt-in")

ENVIRONMENT: dict[str, str] = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "PYTHONUNBUFFERED": "1",
    "VLLM_LOGGING_COLOR": "0",
    "NO_COLOR": "1",
}


@dataclass(frozen=True)
class Build:
    """One build of vLLM.

    Attributes:
        name: what reports call it.
        place: a shell script that selects it when sourced; or a folder for PYTHONPATH; or empty,
            for the vLLM that this Python finds.
    """

    name: str
    place: str = ""

    def command(self, python: Sequence[str]) -> list[str]:
        """The command that runs this Python with arguments `python`, and with this build."""
        run = f"exec {shlex.join([sys.executable, *python])}"
        path = f'export PYTHONPATH="${{PYTHONPATH:+$PYTHONPATH:}}"{shlex.quote(str(ROOT))}'
        if not self.place:
            return ["bash", "-c", f"{path}; {run}"]
        place = Path(self.place).resolve()
        if place.is_dir():
            select = f"export PYTHONPATH={shlex.quote(str(place))}"
        elif place.is_file():
            select = f"unset PYTHONPATH; . {shlex.quote(str(place))}"
        else:
            raise ValueError(f"build {self.name}: {self.place} is neither a file nor a folder")
        return ["bash", "-c", f"{select}; {path}; {run}"]


@dataclass(frozen=True)
class Variant:
    """A build with one setting of the flag: what one engine is.

    Attributes:
        build: the build.
        flag: one of FLAGS; `on` returns rows to every request, `opt-in`, which wants the series,
            to those that ask.
        copy: 1, or more for further engines of the same kind, which show how engines differ.
    """

    build: Build
    flag: str
    copy: int = 1

    @property
    def name(self) -> str:
        return f"{self.build.name} {self.flag}" + (f" #{self.copy}" if self.copy > 1 else "")

    @property
    def options(self) -> dict[str, bool]:
        """Engine arguments that set the flag."""
        options = {"enable_return_routed_experts": self.flag != "off"}
        if self.flag == "opt-in":
            options["routed_experts_opt_in"] = True
        return options


def read_builds(words: Sequence[str]) -> dict[str, Build]:
    """Builds from NAME=PLACE words, in their order.

    Raises:
        ValueError: a word of another form, a name twice.
    """
    builds: dict[str, Build] = {}
    for word in words:
        name, equals, place = word.partition("=")
        if not name or not equals or name in builds:
            raise ValueError(f"{word!r} is not NAME=PLACE, or its name stands twice")
        builds[name] = Build(name, place)
    return builds


def read_variants(words: Sequence[str], builds: Mapping[str, Build]) -> list[Variant]:
    """Variants from BUILD:FLAG words; the same word again makes another copy.

    Raises:
        ValueError: a word of another form, an unknown build or flag.
    """
    variants: list[Variant] = []
    for word in words:
        name, _, flag = word.rpartition(":")
        if name not in builds or flag not in FLAGS:
            raise ValueError(
                f"{word!r} is not BUILD:FLAG with a build of {', '.join(builds)} "
                f"and a flag of {', '.join(FLAGS)}"
            )
        copy = 1 + sum((v.build.name, v.flag) == (name, flag) for v in variants)
        variants.append(Variant(builds[name], flag, copy))
    return variants


class Process:
    """A process of a build under the keeper, which ends it with all it started at the latest when
    this process ends. A context manager."""

    def __init__(
        self, build: Build, python: Sequence[str], log: Path, env: Mapping[str, str] | None = None
    ) -> None:
        """Prepare; entering the context starts it.

        Args:
            build: the build it runs with.
            python: arguments of Python.
            log: file for its output, overwritten.
            env: variables on top of this process's own and of ENVIRONMENT.
        """
        self.command = build.command(python)
        self.log = log
        self.env = {**os.environ, **ENVIRONMENT, **(env or {})}
        self._keeper: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Process:
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("wb") as out:
            self._keeper = subprocess.Popen(
                [sys.executable, "-I", "-S", str(KEEPER), *self.command],
                cwd=ROOT,
                stdin=subprocess.PIPE,
                stdout=out,
                stderr=subprocess.STDOUT,
                env=self.env,
                start_new_session=True,
            )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    @property
    def pid(self) -> int:
        """The keeper's id: all others are its descendants."""
        assert self._keeper is not None, "not started"
        return self._keeper.pid

    def poll(self) -> int | None:
        """The exit status once it and all it started have ended, else None."""
        assert self._keeper is not None, "not started"
        return self._keeper.poll()

    def let_go(self) -> None:
        """Ask it to end, without waiting."""
        if self._keeper is not None and self._keeper.stdin is not None:
            self._keeper.stdin.close()

    def stop(self) -> None:
        """End it and everything it started; returns when all of it is gone."""
        if self._keeper is not None:
            self.let_go()
            self._keeper.wait()

    def tail(self, lines: int) -> str:
        """The log's last lines, long ones cut."""
        try:
            text = self.log.read_text(errors="replace")
        except OSError:
            return ""
        return "\n".join(line[:300] for line in text.splitlines()[-lines:])
