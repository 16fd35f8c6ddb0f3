# SPDX-License-Identifier: Apache-2.0
"""The scripts of deploy/, run with programs that stand in for Docker, apt, Ray and the like."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
DEPLOY = ROOT / "deploy"
IMAGE = "registry.test:5000/some/name@sha256:" + "0123456789abcdef" * 4

_PROGRAM = """\
#!{python} -I
import json, os, sys
call = {{"argv": ["{name}", *sys.argv[1:]], "env": dict(os.environ)}}
with open({log!r}, "a") as log:
    log.write(json.dumps(call) + "\\n")
print({out!r}, end="")
sys.exit({status})
"""


@dataclass(frozen=True)
class Stage:
    """A folder to run scripts in, with stand-ins for programs in front of the machine's."""

    place: Path

    @property
    def log(self) -> Path:
        return self.place / "calls"

    def program(self, name: str, out: str = "", status: int = 0) -> None:
        """Write a program that records its call, prints ``out`` and exits with ``status``."""
        path = self.place / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(
            _PROGRAM.format(
                python=sys.executable, name=name, log=str(self.log), out=out, status=status
            )
        )
        path.chmod(0o755)

    def run(
        self, script: str, *arguments: str, **environment: str
    ) -> subprocess.CompletedProcess[str]:
        env = {
            "PATH": f"{self.place / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}",
            "HOME": str(self.place),
            **environment,
        }
        return subprocess.run(
            [str(DEPLOY / script), *arguments], env=env, capture_output=True, text=True, timeout=120
        )

    def calls(self) -> list[list[str]]:
        """The command lines of the programs, in order."""
        return [call["argv"] for call in self._calls()]

    def environment(self) -> dict[str, str]:
        """The variables of the last of them."""
        return self._calls()[-1]["env"]

    def _calls(self) -> list[dict]:
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        return [json.loads(line) for line in lines]


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    made = Stage(tmp_path / "stage")
    made.place.mkdir()
    return made
