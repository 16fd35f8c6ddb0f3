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
    """A line of `patches/`.

    Attributes:
        name: of the line.
        release: version of vLLM.
        page: of the documentation, in the patched tree.
        options: arguments of `vllm serve`, `vllm run-batch` and the like; they override
            `server.ARGUMENTS`.
        only: arguments that `vllm serve` alone takes.
        environment: variables; they override `process.ENVIRONMENT`.
        packages: folders to put first on PYTHONPATH.
        ready_s: seconds that a server may take to be ready.
        engine: options of `vllm.LLM` in the process of the tests.
        tests: what tests can expect; `upstream.toml` explains each.
    """

    name: str
    release: str
    page: str
    options: tuple[str, ...]
    only: tuple[str, ...]
    environment: Mapping[str, str]
    packages: tuple[Path, ...]
    ready_s: float
    engine: Mapping[str, Any]
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
