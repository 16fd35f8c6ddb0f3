# SPDX-License-Identifier: Apache-2.0
"""Runs one command and leaves no process of it behind, whatever happens to the caller.

    python keeper.py COMMAND ARG...

Standard input is a pipe that the caller holds open and never writes to. When it closes (the caller
closes it, or dies by any signal, also SIGKILL), or when the command ends, the keeper ends
everything that the command started: with SIGTERM, then with SIGKILL. It adopts orphans of the
command (PR_SET_CHILD_SUBREAPER), so it finds grandchildren whose parent died or that moved to
another session. It exits with the status of the command.

SIGKILL to the keeper itself still ends the command, but not what the command started.

Linux only. It uses the standard library alone, so it starts fast.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

GRACE_S = 6.0  # between SIGTERM and SIGKILL; vLLM takes 3 to 4
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl failed")


def _children() -> list[int]:
    """Ids of this process's children, adopted ones included."""
    me = os.getpid()
    return [int(p) for p in Path(f"/proc/{me}/task/{me}/children").read_text().split()]


def _signal_all(pids: list[int], number: signal.Signals) -> None:
    for pid in pids:
        # The whole group where the child leads one. They are our own children and not yet
        # waited for, so these ids cannot have passed to a stranger.
        try:
            if os.getpgid(pid) == pid:
                os.killpg(pid, number)
            else:
                os.kill(pid, number)
        except ProcessLookupError:
            pass


def _reap() -> dict[int, int]:
    """Reap every child that has ended. Returns their ids and exit statuses."""
    ended: dict[int, int] = {}
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return ended
        if pid == 0:
            return ended
        ended[pid] = os.waitstatus_to_exitcode(status)


def main(command: list[str]) -> int:
    """Run `command`; see the module's text. Returns an exit status as a shell would."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    stop_read, stop_write = os.pipe()
    os.set_blocking(stop_write, False)
    # Each of these means the same as a closed pipe; the write of a handler wakes `select`.
    signal.set_wakeup_fd(stop_write)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: None)
    signal.signal(signal.SIGCHLD, lambda *_: None)

    keeper = os.getpid()

    def before_exec() -> None:
        # If the keeper is killed, the command dies with it.
        _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != keeper:
            os._exit(1)

    try:
        leader = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=before_exec
        ).pid
    except OSError as e:
        print(f"cannot start {command[0]}: {e.strerror}", file=sys.stderr)
        return 127

    status: int | None = None
    stopping = False
    while status is None and not stopping:
        readable, _, _ = select.select([0, stop_read], [], [])
        stopping = 0 in readable
        if stop_read in readable:
            stopping |= any(n != signal.SIGCHLD for n in os.read(stop_read, 4096))
        status = _reap().get(leader)

    deadline = time.monotonic() + GRACE_S
    asked: set[int] = set()
    while children := _children():
        force = time.monotonic() > deadline
        # One SIGTERM each: a second one would cut an orderly end short.
        _signal_all(
            children if force else [p for p in children if p not in asked],
            signal.SIGKILL if force else signal.SIGTERM,
        )
        asked.update(children)
        time.sleep(0.05)
        ended = _reap()
        status = ended.get(leader, status)
    if status is None:
        return 1
    return status if status >= 0 else 128 - status


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit("usage: keeper.py COMMAND ARG...")
    sys.exit(main(sys.argv[1:]))
