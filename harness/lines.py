# SPDX-License-Identifier: Apache-2.0
"""What differs between the lines of `patches/` when their vLLM runs on a CPU, from their
`upstream.toml`."""

from __future__ import annotations

import os
import sys
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from tools.common.pin import DEFAULT_LINE, lines

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Line:
    """A line of `patches/`; its `upstream.toml` explains each field."""

    name: str
    release: str
    page: str  # of the documentation, in the patched tree
    options: tuple[str, ...]  # of every server; they override `server.ARGUMENTS`
    only: tuple[str, ...]  # arguments that `vllm serve` alone takes
    environment: Mapping[str, str]
    packages: tuple[Path, ...]  # folders to put first on PYTHONPATH
    ready_s: float
    engine: Mapping[str, Any]  # options of `vllm.LLM` in the process of the tests
    tests: Mapping[str, Any]

    @property
    def arguments(self) -> tuple[str, ...]:
        """Arguments of `vllm serve`."""
        return self.options + self.only

    def variables(self) -> dict[str, str]:
        """`environment`, and PYTHONPATH if the line has `packages`."""
        if not self.packages:
            return dict(self.environment)
        paths = [*map(str, self.packages), *filter(None, [os.environ.get("PYTHONPATH")])]
        return {**self.environment, "PYTHONPATH": os.pathsep.join(paths)}

    def enter(self) -> None:
        """Let this process import the line's vLLM. Call it before vLLM is imported."""
        os.environ.update(self.environment)
        sys.path[:0] = [str(path) for path in self.packages]


def _read(name: str) -> Line:
    data = tomllib.loads((ROOT / "patches" / name / "upstream.toml").read_text(encoding="utf-8"))
    server = data["server"]
    return Line(
        name=name,
        release=data["release"]["version"],
        page=data["release"]["page"],
        options=tuple(server["arguments"]),
        only=tuple(server["only"]),
        environment=server["environment"],
        packages=tuple(ROOT / folder for folder in server["packages"]),
        ready_s=server["ready_s"],
        engine=data["engine"],
        tests=data["tests"],
    )


LINES: dict[str, Line] = {name: _read(name) for name in lines(ROOT)}


def installed() -> str:
    """The line of the vLLM that this Python has; the default line if it has none."""
    try:
        release = metadata.version("vllm").partition("+")[0]
    except metadata.PackageNotFoundError:
        return DEFAULT_LINE
    return next((line.name for line in LINES.values() if line.release == release), DEFAULT_LINE)
