# SPDX-License-Identifier: Apache-2.0
"""Every way to ask for routed experts, on every endpoint of both lines.

`tests/behaviour/test_endpoints.py` and `tests/v0.33.0/test_endpoints.py` walk this table with
servers. `docs/endpoints.md` holds it as `markdown()` writes it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

ASK = "return_routed_experts"
START = "routed_experts_prompt_start"
LAST = "routed_experts_in_last_chunk"

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

ROWS, REFUSED, PASSED, ABSENT = "rows", "refused", "passed on", "–"
FIRST, SECOND = "v0.20.2", "v0.33.0"


@dataclass(frozen=True)
class Endpoint:
    """What a request that asks gets, whichever way it asks.

    Attributes:
        name: as the documentation has it.
        path: of the server.
        body: a valid request that says nothing of routed experts.
        ways: objects of the request in which the arguments may stand.
        lines: `ROWS`, `REFUSED` (HTTP 400, by name), `PASSED` (the rendered request asks) or
            `ABSENT` of each line.
        stream: whether it can stream.
        ends_engine: lines whose engine on a CPU ends at a valid request, in the release too.
    """

    name: str
    path: str
    body: dict[str, Any]
    ways: tuple[tuple[str, ...], ...]
    lines: dict[str, str]
    stream: bool = False
    ends_engine: tuple[str, ...] = ()


def both(what: str) -> dict[str, str]:
    return {FIRST: what, SECOND: what}


CHAT = {"messages": MESSAGES, "max_tokens": 4, "temperature": 0.0}
COMPLETION = {"prompt": PROMPT, "max_tokens": 4, "temperature": 0.0, "ignore_eos": True}
BEAMS = {"max_tokens": 2, "use_beam_search": True, "n": 2}

ENDPOINTS = [
    Endpoint(
        "`/inference/v1/generate`",
        "/inference/v1/generate",
        {
            "token_ids": PROMPT,
            "sampling_params": {"max_tokens": 4, "temperature": 0.0, "ignore_eos": True},
        },
        (FIELD, XARGS, PARAMS, EXTRA),
        both(ROWS),
        stream=True,
    ),
    Endpoint(
        "`/v1/completions`",
        "/v1/completions",
        COMPLETION,
        (FIELD, XARGS),
        both(ROWS),
        stream=True,
    ),
    Endpoint(
        "`/v1/chat/completions`",
        "/v1/chat/completions",
        CHAT,
        (FIELD, XARGS),
        both(ROWS),
        stream=True,
    ),
    Endpoint(
        "`/v1/completions` with `use_beam_search`",
        "/v1/completions",
        {"prompt": PROMPT, **BEAMS},
        (FIELD, XARGS),
        both(REFUSED),
    ),
    Endpoint(
        "`/v1/chat/completions` with `use_beam_search`",
        "/v1/chat/completions",
        {"messages": MESSAGES, **BEAMS},
        (FIELD, XARGS),
        both(REFUSED),
    ),
    Endpoint(
        "`/v1/chat/completions/batch`",
        "/v1/chat/completions/batch",
        {"messages": [MESSAGES, MESSAGES], "max_tokens": 2},
        (FIELD, XARGS),
        both(REFUSED),
    ),
    Endpoint(
        "`/v1/responses`",
        "/v1/responses",
        {"input": "abc", "max_output_tokens": 4},
        (FIELD, XARGS),
        both(REFUSED),
        stream=True,
    ),
    Endpoint(
        "`/v1/messages`",
        "/v1/messages",
        {"messages": MESSAGES, "max_tokens": 4},
        (FIELD, XARGS),
        both(REFUSED),
        stream=True,
    ),
    Endpoint(
        "`/generative_scoring`",
        "/generative_scoring",
        {"query": "abc", "items": ["a", "b"], "label_token_ids": [5, 6]},
        (FIELD, XARGS),
        both(REFUSED),
        # It uses logprob_token_ids, which need Triton.
        ends_engine=(FIRST,),
    ),
    Endpoint(
        "`/v1/completions/render`",
        "/v1/completions/render",
        COMPLETION,
        (FIELD, XARGS),
        both(PASSED),
    ),
    Endpoint(
        "`/v1/chat/completions/render`",
        "/v1/chat/completions/render",
        CHAT,
        (FIELD, XARGS),
        both(PASSED),
    ),
]

# What no server of these tests has. Programs and unit tests in the patches check it.
OTHERS = [
    ("`LLM.generate`, `LLM.chat`", "`SamplingParams`, its `extra_args`", both(ROWS)),
    ("`LLM.beam_search`", "has no argument", both(ABSENT)),
    ("`vllm run-batch`, chat", "field of the body, `vllm_xargs`", both(ROWS)),
    ("`/v1/audio/transcriptions`, `/v1/audio/translations`", "`vllm_xargs`", both(REFUSED)),
    ("`/cohere/v2/chat`", WAYS[FIELD], {FIRST: ABSENT, SECOND: REFUSED}),
    ("gRPC", "has no argument", both(ABSENT)),
]


def markdown() -> str:
    """The table of the documentation."""
    lines = [
        f"| Endpoint | How a request asks | {FIRST} | {SECOND} |",
        "| --- | --- | --- | --- |",
    ]
    for endpoint in ENDPOINTS:
        ways = ", ".join(WAYS[way] for way in endpoint.ways)
        results = " | ".join(endpoint.lines[line] for line in (FIRST, SECOND))
        lines.append(f"| {endpoint.name} | {ways} | {results} |")
    for name, ways, by_line in OTHERS:
        lines.append(f"| {name} | {ways} | {by_line[FIRST]} | {by_line[SECOND]} |")
    return "\n".join(lines) + "\n"
