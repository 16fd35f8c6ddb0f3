# SPDX-License-Identifier: Apache-2.0
"""Every way to ask for routed experts, on every endpoint of every line.

`tests/behaviour/test_endpoints.py` walks this table with servers. It is also in
`docs/endpoints.md`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from harness.lines import LINES

ASK = "return_routed_experts"
START = "routed_experts_prompt_start"
LAST = "routed_experts_in_last_chunk"
# Of lines whose `upstream.toml` says so.
WEIGHTS = "return_routed_experts_weights"

# Variables of servers that have all of these endpoints. Cohere's types are a stand-in
# (`harness/stand_ins`).
ENVIRONMENT = {"VLLM_ENABLE_COHERE_API": "1"}

MESSAGES = [{"role": "user", "content": "abc"}]
PROMPT = [31, 17, 200, 45, 9, 77, 120]

FIELD: tuple[str, ...] = ()
XARGS = ("vllm_xargs",)
PARAMS = ("sampling_params",)
EXTRA = ("sampling_params", "extra_args")
WAYS = {
    FIELD: "field of the request",
    XARGS: "`vllm_xargs`",
    PARAMS: "`sampling_params`",
    EXTRA: "`sampling_params.extra_args`",
}

ROWS = "rows"
REFUSED = "refused"
PASSED = "passed on"
SERVED = "served"
ABSENT = "–"


@dataclass(frozen=True)
class Endpoint:
    """What a request that asks gets on every line that has the endpoint, whichever way it asks:
    `ROWS`, `REFUSED` (HTTP 400, by name), `PASSED` (the rendered request asks) or `SERVED` (it runs
    no engine, and takes requests of other endpoints)."""

    path: str
    body: dict[str, Any]  # a valid request that says nothing of routed experts
    what: str
    ways: tuple[tuple[str, ...], ...] = (FIELD, XARGS)  # objects in which arguments may stand
    stream: bool = False
    silent: int = 200  # status of the answer to `body`: 501 if it wants another model

    @property
    def name(self) -> str:
        """As the documentation has it."""
        beams = " with `use_beam_search`" if "use_beam_search" in self.body else ""
        return f"`{self.path}`{beams}"

    def is_served(self, line: str) -> bool:
        """Whether a server of the line has it."""
        return self.path not in LINES[line].tests["absent"]

    def on(self, line: str) -> str:
        """`what`, or `ABSENT`."""
        return self.what if self.is_served(line) else ABSENT


def put(body: dict[str, Any], way: tuple[str, ...], arguments: dict[str, Any]) -> None:
    """Add arguments to one object of a request, which is made if it is not there."""
    place = body
    for name in way:
        place = place.setdefault(name, {})
    place.update(arguments)


CHAT = {"messages": MESSAGES, "max_tokens": 4, "temperature": 0.0}
COMPLETION = {"prompt": PROMPT, "max_tokens": 4, "temperature": 0.0, "ignore_eos": True}
BEAMS = {"max_tokens": 2, "use_beam_search": True, "n": 2}
# An answer of `/inference/v1/generate`.
GENERATED = {
    "request_id": "0",
    "choices": [{"index": 0, "token_ids": PROMPT, "finish_reason": "length"}],
}

SHORT_CHAT = {"messages": MESSAGES, "max_tokens": 4}
INPUT = {"input": "abc", "max_output_tokens": 4}

ENDPOINTS = [
    Endpoint(
        "/inference/v1/generate",
        {
            "token_ids": PROMPT,
            "sampling_params": {"max_tokens": 4, "temperature": 0.0, "ignore_eos": True},
        },
        ROWS,
        (FIELD, XARGS, PARAMS, EXTRA),
        stream=True,
    ),
    Endpoint("/v1/completions", COMPLETION, ROWS, stream=True),
    Endpoint("/v1/chat/completions", CHAT, ROWS, stream=True),
    Endpoint("/v1/completions", {"prompt": PROMPT, **BEAMS}, REFUSED),
    Endpoint("/v1/chat/completions", {"messages": MESSAGES, **BEAMS}, REFUSED),
    Endpoint(
        "/v1/chat/completions/batch",
        {"messages": [MESSAGES, MESSAGES], "max_tokens": 2},
        REFUSED,
    ),
    Endpoint("/v1/responses", INPUT, REFUSED, stream=True),
    Endpoint("/v1/messages", SHORT_CHAT, REFUSED, stream=True),
    Endpoint(
        "/generative_scoring",
        {"query": "abc", "items": ["a", "b"], "label_token_ids": [5, 6]},
        REFUSED,
    ),
    Endpoint("/v1/completions/render", COMPLETION, PASSED),
    Endpoint("/v1/chat/completions/render", CHAT, PASSED),
    Endpoint("/invocations", CHAT, ROWS, stream=True),
    Endpoint("/cohere/v2/chat", SHORT_CHAT, REFUSED, stream=True),
    Endpoint("/cohere/v2/chat/render", SHORT_CHAT, REFUSED),
    Endpoint("/v1/responses/render", INPUT, REFUSED),
    Endpoint("/v1/messages/render", SHORT_CHAT, REFUSED),
    Endpoint("/v1/completions/derender", {"generate_responses": [GENERATED]}, REFUSED),
    Endpoint("/v1/chat/completions/derender", {"generate_response": GENERATED}, REFUSED),
    Endpoint(
        "/v1/decisions",
        {"input": "abc", "questions": [{"type": "predicate", "instructions": "a"}]},
        REFUSED,
        silent=501,
    ),
    Endpoint(
        "/v1/systemone",
        {
            "state": "abc",
            "questions": {"a": {"type": "choice", "criteria": {"b": None, "c": None}}},
        },
        REFUSED,
        silent=501,
    ),
    Endpoint("/v1/messages/count_tokens", {"messages": MESSAGES}, REFUSED),
    Endpoint("/detokenize", {"tokens": PROMPT}, REFUSED),
    Endpoint("/tokenize", {"prompt": "abc"}, SERVED),
]


def find(path: str) -> Endpoint:
    """The endpoint of this path without beam search."""
    return next(endpoint for endpoint in ENDPOINTS if endpoint.path == path)
