# SPDX-License-Identifier: Apache-2.0
"""What the tests of this folder send."""

from __future__ import annotations

import json
from typing import Any

import httpx
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st

from harness.server import Server
from tests import endpoints

PROMPT = [31, 17, 200, 45, 9, 77, 120, 8]
BODIES: dict[str, dict[str, Any]] = {
    "/inference/v1/generate": {"token_ids": PROMPT, "sampling_params": {"max_tokens": 2}},
    "/v1/completions": {"prompt": PROMPT, "max_tokens": 2},
    "/v1/chat/completions": {"messages": endpoints.MESSAGES, "max_tokens": 2},
}
SEED = 20260
FUZZ = settings(
    max_examples=40,
    deadline=None,
    database=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner),
    max_leaves=5,
)


def post(server: Server, path: str, body: str) -> tuple[int, str]:
    """Status and text of an answer. The status of an error within a stream counts."""
    reply = httpx.post(
        server.url + path,
        content=body,
        headers={"Content-Type": "application/json"},
        timeout=120,
        trust_env=False,
        verify=False,  # certificates of the system take longer to load than most answers take
    )
    return streamed_error(reply.text) or reply.status_code, reply.text


def streamed_error(text: str) -> int | None:
    """The code of an error that a stream brings, if it brings one."""
    for line in text.splitlines():
        if line.startswith('data: {"error"'):
            return int(json.loads(line.removeprefix("data: "))["error"]["code"])
    return None
