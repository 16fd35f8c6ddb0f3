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

# Every vLLM runs with these: little output, no network.
QUIET: dict[str, str] = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "PYTHONUNBUFFERED": "1",
    "VLLM_LOGGING_COLOR": "0",
    "NO_COLOR": "1",
}
# Every vLLM of demos and tests runs with these.
ENVIRONMENT: dict[str, str] = {
    **QUIET,
    # vLLM compiles one small sampling function even with --enforce-eager. This takes 10 to 25 s and
    # needs a C++ compiler.
    "TORCH_COMPILE_DISABLE": "1",
}


class Kept:
    """A child process that ends, with all its descendants, at the latest when the caller ends. A
    context manager; `keeper.py` does the work."""

    def __init__(
        self,
        command: Sequence[str],
        log: Path,
        env: Mapping[str, str] | None = None,
        *,
        common: Mapping[str, str] = ENVIRONMENT,
        cwd: Path | None = None,
    ) -> None:
        """Prepare; entering the context starts it. `log` gets its output; `env` is on top of this
        process's own variables and of `common`."""
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
                # Ctrl-C reaches only the caller, which then ends this process.
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
        """The process id of the keeper; all other processes are its descendants."""
        assert self._keeper is not None, "not started"
        return self._keeper.pid

    def poll(self) -> int | None:
        """The exit status of the command after it and its descendants have ended, else None."""
        assert self._keeper is not None, "not started"
        return self._keeper.poll()

    def let_go(self) -> None:
        """End the command and its descendants without waiting."""
        if self._keeper is not None and self._keeper.stdin is not None:
            with contextlib.suppress(OSError):
                self._keeper.stdin.close()  # tells the keeper to end everything

    def stop(self) -> None:
        """End the command and its descendants, and wait until they are gone."""
        if self._keeper is None:
            return
        self.let_go()
        self._keeper.wait()
        self._keeper = None

    def last_line(self) -> str:
        """The last line of the log that is no warning, without its prefix."""
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
            # Workers on a machine without a GPU always end with this line.
            if "Found no NVIDIA driver" in line:
                continue
            if re.match(r"[\w.]*(Error|Exception): |\S+( serve)?: error: ", line):
                # Pydantic gives the reason on the next line.
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
    """A free loopback port. A server binds it seconds later, so it lies below the ports that Linux
    assigns by itself."""
    chance = random.SystemRandom()  # engines in this process seed the default generator
    while True:
        port = chance.randrange(20000, 32768)
        with socket.socket() as s, contextlib.suppress(OSError):
            s.bind(("127.0.0.1", port))
            return port
