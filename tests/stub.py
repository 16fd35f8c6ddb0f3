# SPDX-License-Identifier: Apache-2.0
"""A server on loopback that gives the same answer to every request, and keeps the requests."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self


@dataclass
class Stub:
    """It closes connections without notice, as vLLM does after a refusal."""

    answer: Any = ""  # to each POST: JSON or a text
    status: int = 200
    health: int = 200  # status of `/health`
    together: int = 1  # requests that must wait before it answers
    url: str = ""  # while it runs
    sent: list[dict[str, Any]] = field(default_factory=list)  # path and fields of each POST

    @contextmanager
    def running(self) -> Iterator[Self]:
        barrier = threading.Barrier(self.together)

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            answered = False

            def do_POST(handler) -> None:
                if handler.answered:
                    handler.close_connection = True
                    return
                handler.answered = True
                body = json.loads(handler.rfile.read(int(handler.headers["Content-Length"])))
                self.sent.append({"path": handler.path, **body})
                barrier.wait(60)
                text = self.answer if isinstance(self.answer, str) else json.dumps(self.answer)
                handler.reply(self.status, text.encode())

            def do_GET(handler) -> None:
                handler.reply(self.health if handler.path == "/health" else 404, b"")

            def reply(handler, status: int, content: bytes) -> None:
                handler.send_response(status)
                handler.send_header("Content-Length", str(len(content)))
                handler.end_headers()
                handler.wfile.write(content)

            def log_message(self, *args: Any) -> None:
                pass

        class Listener(ThreadingHTTPServer):
            request_queue_size = 256

        with Listener(("127.0.0.1", 0), Handler) as server:
            threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
            self.url = f"http://127.0.0.1:{server.server_port}"
            try:
                yield self
            finally:
                server.shutdown()
