# SPDX-License-Identifier: Apache-2.0
"""Several builds of vLLM side by side, and processes that use one of them."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.common import ROOT

# The last two also return the weights of the experts, in this dtype.
WEIGHTS = ("float32", "float16")
FLAGS = ("off", "on", "opt-in", *WEIGHTS)


@dataclass(frozen=True)
class Build:
    """One build of vLLM."""

    name: str
    place: str = ""  # a script to source, a folder for PYTHONPATH, or empty: what Python finds

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
    """A build with one setting of the flag; each engine runs one. `off` returns no rows, and `on`
    returns rows to every request. The others return rows to requests that ask (the series only).
    """

    build: Build
    flag: str

    @property
    def name(self) -> str:
        return f"{self.build.name} {self.flag}"

    @property
    def options(self) -> dict[str, Any]:
        """Engine arguments that set the flag."""
        options: dict[str, Any] = {"enable_return_routed_experts": self.flag != "off"}
        if self.flag not in ("off", "on"):
            options["routed_experts_opt_in"] = True
        if self.flag in WEIGHTS:
            options["routed_experts_weights"] = self.flag
        return options

    def modes(self, wanted: Sequence[str]) -> list[str]:
        """The wanted modes that the engine has."""
        if self.flag in ("off", "on"):
            return [self.flag]
        return [mode for mode in wanted if mode != "both" or self.flag in WEIGHTS]


def read_builds(words: Sequence[str]) -> dict[str, Build]:
    """Builds from NAME=PLACE words, in their order. Raises ValueError for a wrong word."""
    builds: dict[str, Build] = {}
    for word in words:
        name, equals, place = word.partition("=")
        if not name or not equals or name in builds:
            raise ValueError(f"{word!r} is not NAME=PLACE, or its name stands twice")
        builds[name] = Build(name, place)
    return builds


def read_variants(words: Sequence[str], builds: Mapping[str, Build]) -> list[Variant]:
    """Variants from BUILD:FLAG words. Raises ValueError for a wrong word."""
    variants: list[Variant] = []
    for word in words:
        name, _, flag = word.rpartition(":")
        if name not in builds or flag not in FLAGS or words.count(word) > 1:
            raise ValueError(
                f"{word!r} is not BUILD:FLAG with a build of {', '.join(builds)} "
                f"and a flag of {', '.join(FLAGS)}, or it stands twice"
            )
        variants.append(Variant(builds[name], flag))
    return variants
