# SPDX-License-Identifier: Apache-2.0
"""A child process that never outlives its caller."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import re
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

KEEPER = Path(__file__).with_name("keeper.py")

# How vLLM begins a log line: which process, then level, time and place.
_SPEAKER = re.compile(r"^\([^)]*\) ")
_LEVEL = re.compile(r"^[A-Z]+ \d\d-\d\d [\d:]+ \[[^]]*\] ?")

# What every vLLM runs with: quietly, and without a network.
QUIET: dict[str, str] = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "PYTHONUNBUFFERED": "1",
    "VLLM_LOGGING_COLOR": "0",
    "NO_COLOR": "1",
}
# What every vLLM of the demo runs with.
ENVIRONMENT: dict[str, str] = {
    **QUIET,
    # vLLM compiles one small sampling function even with --enforce-eager: 10 to 25 s, most
    # of it spent asking a C++ compiler, which need not be there, for its vector units.
    "TORCH_COMPILE_DISABLE": "1",
}


class Kept:
    """A child process under the keeper: it ends, with all its descendants, at the latest
    when the caller does, however that comes about. A context manager."""

    def __init__(
        self,
        command: Sequence[str],
        log: Path,
        env: Mapping[str, str] | None = None,
        *,
        common: Mapping[str, str] = ENVIRONMENT,
        cwd: Path | None = None,
    ) -> None:
        """Prepare; entering the context starts it.

        Args:
            command: program and arguments.
            log: file for its output, overwritten.
            env: variables on top of this process's own and of `common`.
            common: what every such process runs with.
            cwd: its working folder, if another than this process's.
        """
        self.command = list(command)
        self.log = log
        self.env = {**os.environ, **common, **(env or {})}
        self.cwd = cwd
        self._keeper: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("wb") as out:
            self._keeper = subprocess.Popen(
                [sys.executable, "-I", "-S", str(KEEPER), *self.command],
                cwd=self.cwd,
                stdin=subprocess.PIPE,
                stdout=out,
                stderr=subprocess.STDOUT,
                env=self.env,
                # Out of the terminal's reach: Ctrl-C is for the caller, which then lets go.
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
        """The command's exit status once it and all it started have ended, else None."""
        assert self._keeper is not None, "not started"
        return self._keeper.poll()

    def let_go(self) -> None:
        """Ask it to end, with everything it started, and do not wait."""
        if self._keeper is not None and self._keeper.stdin is not None:
            with contextlib.suppress(OSError):
                self._keeper.stdin.close()  # the keeper's sign to end everything

    def stop(self) -> None:
        """End it and everything it started; returns when all of it is gone."""
        if self._keeper is None:
            return
        self.let_go()
        self._keeper.wait()
        self._keeper = None

    def last_line(self) -> str:
        """The log's last line that says what goes on, without prefix; warnings do not."""
        for line in reversed(self.tail(40).splitlines()):
            plain = _SPEAKER.sub("", line)
            if not re.match(r"\s|W\d{4} |\[?W|.*(Warning|Error|Traceback)|$", plain):
                return re.sub(r"^INFO( \d\d-\d\d [\d:]+ \[[^]]*\]|:)\s*", "", plain)
        return ""

    def first_error(self) -> str:
        """The log's first line that names an exception or a usage error, else ""."""
        try:
            lines = self.log.read_text(errors="replace").splitlines()
        except OSError:
            return ""
        plain = [_LEVEL.sub("", _SPEAKER.sub("", line)) for line in lines]
        for line, following in itertools.zip_longest(plain, plain[1:], fillvalue=""):
            # Any end of a worker on a machine without GPU says that: no reason for it.
            if "Found no NVIDIA driver" in line:
                continue
            if re.match(r"[\w.]*(Error|Exception): |\S+( serve)?: error: ", line):
                # Pydantic says what is wrong only on the next line.
                told = following if "validation error" in line else line
                return told.split(" [type=")[0].strip()
        return ""

    def tail(self, lines: int) -> str:
        """The log's last lines."""
        try:
            with self.log.open("rb") as f:
                f.seek(0, os.SEEK_END)
                f.seek(max(0, f.tell() - 200 * lines))
                text = f.read().decode(errors="replace")
        except OSError:
            return ""
        return "\n".join(re.sub(r".*\r", "", t) for t in text.splitlines()[-lines:])


def free_port() -> int:
    """A loopback port that nobody uses now. Servers take theirs seconds later: it lies below
    those that Linux gives to whoever asks for any."""
    chance = random.SystemRandom()  # engines of this process seed the other one
    while True:
        port = chance.randrange(20000, 32768)
        with socket.socket() as s, contextlib.suppress(OSError):
            s.bind(("127.0.0.1", port))
            return port
