# SPDX-License-Identifier: Apache-2.0
"""Shared by the demos: start, progress, and exit status."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from rich.console import Console
from rich.markup import escape

from harness.checkpoint import SETTINGS_FILE, make_checkpoint
from harness.server import Server, ServerError

NEEDED_BYTES = 200 << 20


class Failure(Exception):
    """The demo failed; the text says why, in one sentence."""


class _Signalled(BaseException):
    """A signal asks the program to end. Like KeyboardInterrupt, it is no `Exception`."""

    def __init__(self, number: int) -> None:
        self.number = number


def run(body: Callable[[Console], None]) -> int:
    """Run the body of a program; print why it failed if it did. Returns the exit status: 0 done; 1
    failed; 130 or 128 + n ended by Ctrl-C or signal n."""
    # Without a terminal, rich assumes 80 columns: too few for the tables.
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 110)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _raise)
    try:
        body(console)
    except (Failure, ServerError, ValueError) as e:
        console.print(f"[bold red]FAILED[/]  {escape(str(e))}", soft_wrap=True)
        return 1
    except OSError as e:
        where = f"{e.filename}: " if e.filename else ""
        reason = escape(where + (e.strerror or str(e)))
        console.print(f"[bold red]FAILED[/]  {reason}", soft_wrap=True)
        return 1
    except KeyboardInterrupt:
        console.print("[bold red]STOPPED[/]  by Ctrl-C")
        return 130
    except _Signalled as e:
        name = signal.Signals(e.number).name
        console.print(f"[bold red]STOPPED[/]  by {name}")
        return 128 + e.number
    return 0


def prepare(out: Path) -> dict[str, str]:
    """Make the output folder; check that vLLM is installed and the disk has room. Returns variables
    for vLLM's processes."""
    # The folder vllm/ of the repository is importable too, as a namespace without a file.
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        raise Failure(f"{sys.executable} has no vllm: `make install` installs it")
    if out.exists() and not out.is_dir():
        raise Failure(f"{out} is a file; --out must be a folder")
    out.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(out).free
    if free < NEEDED_BYTES:
        raise Failure(
            f"{out} has {free / 2**20:,.0f} MiB of free disk space; "
            f"{NEEDED_BYTES / 2**20:,.0f} MiB are needed"
        )
    # Caches of vLLM and matplotlib go to the build folder, not to the home directory.
    cache = (out / "cache").resolve()
    os.environ.setdefault("MPLCONFIGDIR", str(cache / "matplotlib"))
    return {"VLLM_CACHE_ROOT": str(cache / "vllm")}


def arguments(name: str, description: str, out: str) -> argparse.ArgumentParser:
    """The parser of a demo, with `--out`, by default `out`."""
    parser = argparse.ArgumentParser(prog=f"python -m {name}", description=description)
    parser.add_argument(
        "--out", type=Path, default=Path(out), help="folder for everything (%(default)s)"
    )
    return parser


def checkpoint(console: Console, out: Path, **options: Any) -> Path:
    """Make the checkpoint in `out`, or reuse it, and print which."""
    settings = out / "checkpoint" / SETTINGS_FILE
    before = settings.stat().st_mtime_ns if settings.exists() else None
    with console.status("making a small random Qwen3-MoE checkpoint"):
        made = make_checkpoint(out / "checkpoint", **options)
    how = "reused" if before == settings.stat().st_mtime_ns else "made"
    console.print(f"[bold]checkpoint[/]  {escape(str(made))}, {how}")
    return made


@contextlib.contextmanager
def serving(
    console: Console,
    model: Path,
    log: Path,
    args: Sequence[str],
    env: Mapping[str, str],
) -> Iterator[Server]:
    """Start a `Server`, print how long it took, and stop it at the end."""
    with contextlib.ExitStack() as running:
        with Waiting(console, "starting vllm serve") as waiting:
            made = Server(model, log, args, env, progress=waiting.progress)
            server = running.enter_context(made)
        version = json.loads(server.get("/version"))["version"]
        console.print(
            f"[bold]server[/]      vLLM {escape(str(version))}, ready after {waiting.elapsed:.0f} s"
            f", log in {escape(str(log))}"
        )
        yield server
        with console.status("stopping the server"):
            server.stop()


class Waiting:
    """Shows progress: a spinner on a terminal, a line every ten seconds in a file."""

    EVERY_S = 10.0

    def __init__(self, console: Console, what: str) -> None:
        self._console, self._what = console, what
        self._status = console.status(what)
        self._began = self._told = time.monotonic()

    def __enter__(self) -> Waiting:
        self._status.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._status.stop()
        self.ended = time.monotonic()

    @property
    def elapsed(self) -> float:
        """Seconds since the start."""
        return getattr(self, "ended", time.monotonic()) - self._began

    def progress(self, elapsed: float, line: str) -> None:
        """Show the seconds so far and the log's last line."""
        room = max(0, self._console.width - len(self._what) - 14)  # keep it on one line
        told = f"{self._what}  {elapsed:3.0f} s  [dim]{escape(line[:room])}[/]"
        self._status.update(told)
        if not self._console.is_terminal and time.monotonic() - self._told > self.EVERY_S:
            self._told = time.monotonic()
            self._console.print(told)


def _raise(number: int, frame: FrameType | None) -> NoReturn:
    raise _Signalled(number)
