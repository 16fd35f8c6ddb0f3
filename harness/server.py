# SPDX-License-Identifier: Apache-2.0
"""A `vllm serve` on a loopback port that never outlives its caller.

    with Server(checkpoint, log=Path("server.log")) as server:
        answer = server.generate([1, 2, 3], max_tokens=8)

The `vllm` is the one that `sys.executable` finds: PYTHONPATH selects another.
"""

from __future__ import annotations

import contextlib
import json
import re
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np

from examples import client
from examples.client import Completion, Rows
from harness.lines import LINES, installed
from harness.process import Kept, free_port

# Called about ten times a second while waiting, with the seconds so far and the last log line.
Progress = Callable[[float, str], None]

# A small engine: eager, with little memory.
ARGUMENTS: tuple[str, ...] = (
    "--dtype=float32",
    "--enforce-eager",
    "--max-model-len=1024",
    "--max-num-seqs=8",
    "--block-size=32",
    f"--kv-cache-memory-bytes={64 << 20}",
)


# Of an answer without `routed_experts`.
NO_ROWS: Rows = np.empty((0, 0, 0), np.uint8)


class ServerError(Exception):
    """The server could not do what was asked; the text is for the user."""


class Server(Kept):
    """`vllm serve` of one checkpoint; entering the context waits until it is ready."""

    def __init__(
        self,
        checkpoint: Path | str,
        log: Path,
        args: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        *,
        program: Sequence[str] = (sys.executable, "-m", "vllm.entrypoints.cli.main", "serve"),
        line: str | None = None,
        timeout_s: float | None = None,
        progress: Progress | None = None,
    ) -> None:
        """Prepare to serve a checkpoint; nothing starts yet. `args` override `ARGUMENTS` and the
        line's, `env` the line's variables. `program` gets the checkpoint and the arguments. `line`
        is the installed one by default, `timeout_s` its `ready_s`. `progress` is called while
        waiting."""
        self.checkpoint = str(checkpoint)
        self.line = LINES[line or installed()]
        self.timeout_s = self.line.ready_s if timeout_s is None else timeout_s
        self.progress = progress
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        command = [*program, self.checkpoint, *ARGUMENTS, *self.line.arguments, *args]
        command += ["--host=127.0.0.1", f"--port={self.port}"]
        super().__init__(command, log, {**self.line.variables(), **(env or {})})

    def __enter__(self) -> Self:
        super().__enter__()
        try:
            self._wait_until_ready()
        except BaseException:
            self.stop()
            raise
        return self

    def generate(
        self,
        token_ids: Sequence[int],
        timeout_s: float = 120.0,
        *,
        states_place: bool = True,
        proxy: str | None = None,
        **sampling: Any,
    ) -> Completion:
        """Complete one prompt by `/inference/v1/generate`, or by a proxy's; greedy unless
        `sampling` says otherwise. Raises ServerError."""
        reply = self.post(
            "/inference/v1/generate",
            {
                "model": self.checkpoint,
                "token_ids": list(token_ids),
                "sampling_params": {"temperature": 0.0, **sampling},
            },
            timeout_s,
            url=proxy,
        )
        return read_answer(token_ids, reply, states_place=states_place)

    def post(
        self, path: str, body: Mapping[str, Any], timeout_s: float = 120.0, url: str | None = None
    ) -> Any:
        """POST JSON and read JSON, at `url` if not at the server itself. Raises ServerError unless
        the status is 200."""
        request = urllib.request.Request(
            (url or self.url) + path,
            data=json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )
        return json.loads(self._open(request, timeout_s))

    def get(self, path: str, timeout_s: float = 60.0) -> str:
        """GET a text, for example "/metrics". Raises ServerError as `post` does."""
        return self._open(urllib.request.Request(self.url + path), timeout_s).decode()

    def metric(self, name: str) -> float | None:
        """Sum of a counter or gauge of `/metrics` over its labels; None if it is not there."""
        pattern = re.compile(rf"^{re.escape(name)}(?:{{[^}}]*}})? (\S+)$", re.MULTILINE)
        values = [float(v) for v in pattern.findall(self.get("/metrics"))]
        return sum(values) if values else None

    def _open(self, request: urllib.request.Request, timeout_s: float) -> bytes:
        try:
            with _direct.open(request, timeout=timeout_s) as reply:
                return bytes(reply.read())
        except urllib.error.HTTPError as e:
            detail = e.read().decode(errors="replace")[:500]
            raise ServerError(f"{request.selector} answered {e.code}: {detail}") from e
        except (OSError, ValueError) as e:
            reason = getattr(e, "reason", e)
            raise ServerError(f"{request.selector} gave no answer: {reason}") from e

    def _wait_until_ready(self) -> None:
        began = time.monotonic()
        health = urllib.request.Request(self.url + "/health")
        while True:
            waited = time.monotonic() - began
            if self.poll() is not None:
                why = self.first_error() or self.last_line() or "its log is empty"
                raise ServerError(
                    f"the server ended with status {self.poll()} before it was ready: {why} "
                    f"(log: {self.log})"
                )
            with contextlib.suppress(ServerError):
                self._open(health, 1.0)
                # Another program could have taken the port before the server.
                if self.checkpoint in self.get("/v1/models"):
                    return
            if waited > self.timeout_s:
                raise ServerError(
                    f"the server was not ready after {self.timeout_s:.0f} s, last saying "
                    f"{self.last_line()!r} (log: {self.log})"
                )
            if self.progress:
                self.progress(waited, self.last_line())
            time.sleep(0.1)


def read_answer(
    prompt: Sequence[int], reply: Mapping[str, Any], *, states_place: bool = True
) -> Completion:
    """Read the choice of a reply of `/inference/v1/generate`, with `NO_ROWS` if it has none.
    Releases without a series do not state the position of the first row, which is then 0, nor the
    MoE layers. Raises ServerError if the reply has another form."""
    try:
        choice = reply["choices"][0]
        token_ids, sent = tuple(int(t) for t in choice["token_ids"]), choice.get("routed_experts")
        if sent is not None and states_place:
            return client.join(prompt, [reply])[0]
        rows = NO_ROWS if sent is None else client.decode_rows(sent)
    except (KeyError, IndexError, TypeError, ValueError) as e:
        raise ServerError(f"the answer cannot be read: {type(e).__name__}: {e}") from e
    wanted = len(prompt) + len(token_ids) - 1
    if sent is not None and len(rows) != wanted:
        raise ServerError(f"the answer has {len(rows)} rows; its tokens make {wanted}")
    return Completion(tuple(prompt), token_ids, (), rows, start=0, moe_layers=())


# Never use a proxy of the environment for loopback.
_direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
