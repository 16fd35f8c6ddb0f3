# SPDX-License-Identifier: Apache-2.0
"""No request stops the server or hurts the next one.

Requests come from the running server's own OpenAPI schema (schemathesis) and from a list of hostile
values for the two arguments. After each, the server must answer a plain request with true rows.
The same seed makes the same requests.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, assume, given, seed, settings
from hypothesis import strategies as st
from schemathesis.specs.openapi.checks import response_schema_conformance

from examples.demo import oracle
from examples.demo.server import Server, decode_rows
from tests.behaviour.conftest import CHUNK, random_prompt

pytestmark = pytest.mark.slow

SEED = 20260
EXAMPLES = 150
PROMPT = random_prompt(1, 20)
MESSAGES = [{"role": "user", "content": "abc"}]

# What a valid request needs, and where its arguments stand.
ENDPOINTS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "/inference/v1/generate": (
        {"token_ids": PROMPT, "sampling_params": {"max_tokens": 2}},
        ("sampling_params", "extra_args"),
    ),
    "/v1/completions": ({"prompt": PROMPT, "max_tokens": 2}, ("vllm_xargs",)),
    "/v1/chat/completions": ({"messages": MESSAGES, "max_tokens": 2}, ("vllm_xargs",)),
}
ASK, START = "return_routed_experts", "routed_experts_prompt_start"


@pytest.fixture(scope="module")
def model(checkpoint: Callable[..., Path]) -> Path:
    return checkpoint()


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    arguments = ["--enable-return-routed-experts", f"--max-num-batched-tokens={CHUNK}"]
    # Long answers and many choices would only take time.
    arguments += ["--max-model-len=64"]
    log = tmp_path_factory.mktemp("server") / "server.log"
    env = {"VLLM_MAX_N_SEQUENCES": "4"}
    with Server(model, log=log, args=arguments, env=env) as server:
        yield server


@pytest.fixture(scope="module")
def check_server(server: Server, model: Path) -> Callable[[], None]:
    """Checks that the server is alive and right."""
    probe = random_prompt(2, 9)
    body = {"token_ids": probe, "sampling_params": {"max_tokens": 3, "temperature": 0.0}}
    tokens = [*probe, *server.generate(probe, max_tokens=3).token_ids]
    routes = oracle.route(model, tokens)

    def check() -> None:
        (choice,) = server.post("/inference/v1/generate", body)["choices"]
        assert [*probe, *choice["token_ids"]] == tokens
        rows = decode_rows(choice["routed_experts"])
        assert len(rows) == len(tokens) - 1
        assert oracle.compare(rows, routes).agree == len(rows)

    return check


def post(server: Server, path: str, body: str) -> tuple[int, str]:
    """Status and text of an answer. The status of an error within a stream counts."""
    reply = httpx.post(
        server.url + path,
        content=body,
        headers={"Content-Type": "application/json"},
        timeout=60,
    )
    return streamed_error(reply.text) or reply.status_code, reply.text


def streamed_error(text: str) -> int | None:
    """The code of an error that a stream brings, if it brings one."""
    for line in text.splitlines():
        if line.startswith('data: {"error"'):
            return int(json.loads(line.removeprefix("data: "))["error"]["code"])
    return None


def write_body(server: Server, path: str, arguments: str, **more: Any) -> str:
    """A request whose arguments are the given text, which need not be valid JSON."""
    base, place = ENDPOINTS[path]
    body = json.loads(json.dumps({"model": server.checkpoint, **base, **more}))
    inner = body
    for name in place[:-1]:
        inner = inner[name]
    inner[place[-1]] = "<arguments>"
    return json.dumps(body).replace('"<arguments>"', arguments)


def both(name: str, *values: str) -> list[Any]:
    return [pytest.param(name, f'{{"{name}": {v}}}', id=f"{name}={v[:24]}") for v in values]


FLOATS = ("0.0", "1.0", "1.5", "-0.0", "NaN", "Infinity", "-Infinity", "1e400", "1e-400")
HUGE = (str(2**63), str(2**64), str(2**65), str(-(2**65)), "1" + "0" * 400)
OTHERS = ('""', '"yes"', '"1e3"', '"\\u0000"', '"\\ud800"', "[]", "[1]", "[[1]]", "{}", '{"a": 1}')

HOSTILE = [
    *both(ASK, *FLOATS, *HUGE, *OTHERS, "2", "-1", '"TRUE"', '"True"', '"1"', "[true]"),
    *both(ASK, '"' + "x" * 100_000 + '"'),
    *both(START, *FLOATS, *HUGE, *OTHERS, "true", "false", "-1", "65", "1000000", '"0"', '"true"'),
    pytest.param(START, f'{{"{START}": 0, "{START}": -1}}', id="the last of two keys is bad"),
    pytest.param(START, f'{{"{ASK}": true, "{START}": 1.5}}', id="one of two arguments is bad"),
    pytest.param(START, f'{{"{ASK}": false, "{START}": -1}}', id="bad though it declines"),
]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("path", ENDPOINTS)
@pytest.mark.parametrize(("name", "arguments"), HOSTILE)
def test_hostile_value_is_a_400_that_names_the_argument(
    server: Server,
    check_server: Callable[[], None],
    path: str,
    stream: bool,
    name: str,
    arguments: str,
) -> None:
    status, text = post(server, path, write_body(server, path, arguments, stream=stream))
    assert status == 400, text
    assert name in text
    check_server()


@pytest.mark.parametrize(
    "arguments",
    [
        "[]",
        '"x"',
        "5",
        "true",
        f'{{"{ASK}": }}',
        f'{{"{ASK}": true',
        f'{{"{START}": {"9" * 5000}}}',
        f'{{"{START}": {"[" * 900}{"]" * 900}}}',
        f'{{"{ASK}": \x00}}',
    ],
    ids=lambda text: text[:40].replace("\x00", "NUL"),
)
@pytest.mark.parametrize("path", ENDPOINTS)
def test_arguments_that_are_none_are_a_400(
    server: Server, check_server: Callable[[], None], path: str, arguments: str
) -> None:
    status, text = post(server, path, write_body(server, path, arguments))
    assert status == 400, text
    check_server()


@pytest.mark.parametrize(
    ("arguments", "start"),
    [
        ("null", 0),
        ("{}", 0),
        (f'{{"{ASK}": 1}}', 0),
        (f'{{"{ASK}": "true"}}', 0),
        (f'{{"{ASK}": true, "{START}": 3}}', 3),
        (f'{{"{START}": -1, "{START}": 2}}', 2),
        (f'{{"{ASK}": 0}}', None),
        (f'{{"{ASK}": "false"}}', None),
        (f'{{"{ASK}": true, "{ASK}": false}}', None),
    ],
)
@pytest.mark.parametrize("path", ENDPOINTS)
def test_odd_but_valid_arguments_are_taken(
    server: Server, path: str, arguments: str, start: int | None
) -> None:
    status, text = post(server, path, write_body(server, path, arguments))
    assert status == 200, text
    (choice,) = json.loads(text)["choices"]
    assert choice.get("routed_experts_start") == start
    assert ("routed_experts" in choice) == (start is not None)


def has_odd_tool_call(body: dict[str, Any]) -> bool:
    messages = body.get("messages")
    calls = [
        call
        for message in (messages if isinstance(messages, list) else [])
        if isinstance(message, dict) and isinstance(message.get("tool_calls"), list)
        for call in message["tool_calls"]
    ]
    return any(not isinstance(call, dict) or "function" not in call for call in calls)


def sampling_params(body: dict[str, Any]) -> dict[str, Any]:
    params = body.get("sampling_params", body)
    return params if isinstance(params, dict) else {}


def has_blank_bad_word(body: dict[str, Any]) -> bool:
    words = sampling_params(body).get("bad_words")
    words = words if isinstance(words, list) else []
    return any(isinstance(word, str) and not word.strip() for word in words)


# What the pinned release answers with 500, or dies of, without the series: not sent.
KNOWN: dict[str, Callable[[dict[str, Any]], bool]] = {
    "a tool call that is no function: KeyError in chat_utils._postprocess_messages": (
        has_odd_tool_call
    ),
    "logprob_token_ids: the CPU engine, which has no Triton, ends": (
        lambda body: sampling_params(body).get("logprob_token_ids") is not None
    ),
    "a blank bad word: IndexError in SamplingParams.update_from_tokenizer": has_blank_bad_word,
    "features for a model that takes none: KeyError in InputProcessor.process_inputs": (
        lambda body: body.get("features") is not None
    ),
}


# Half of the requests from the schema get these, so that they reach the engine.
ARGUMENTS = st.fixed_dictionaries(
    {},
    optional={
        ASK: st.one_of(st.sampled_from([True, False, 0, 1, "true", None]), st.integers()),
        START: st.one_of(
            st.integers(-1, 21),
            st.floats(allow_nan=False, allow_infinity=False),
            st.booleans(),
            st.text(),
        ),
    },
)


def repair(body: dict[str, Any], server: Server, path: str, arguments: dict[str, Any]) -> None:
    """Give a generated request the model, a prompt and arguments of the right form."""
    base, place = ENDPOINTS[path]
    body["model"] = server.checkpoint
    for name, value in base.items():
        if name == "sampling_params":
            body[name] = {**body[name], **value} if isinstance(body.get(name), dict) else value
        else:
            body[name] = value
    inner = body
    for name in place[:-1]:
        inner = inner[name]
    inner[place[-1]] = arguments


@pytest.mark.parametrize("path", ENDPOINTS)
def test_requests_from_the_schema_do_no_harm(
    server: Server, check_server: Callable[[], None], path: str
) -> None:
    schema = schemathesis.openapi.from_url(server.url + "/openapi.json")
    answered = set()

    @seed(SEED)
    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=schema[path]["POST"].as_strategy(), arguments=ARGUMENTS, valid=st.booleans())
    def send(case: Any, arguments: dict[str, Any], valid: bool) -> None:
        if valid and isinstance(case.body, dict):
            repair(case.body, server, path, arguments)
        if isinstance(case.body, dict):
            assume(not any(known(case.body) for known in KNOWN.values()))
        reply = case.call(timeout=60)
        answered.add(reply.status_code)
        case.validate_response(reply, checks=[response_schema_conformance])
        status = streamed_error(reply.text) or reply.status_code
        # 501 is the answer to, say, a file within a message.
        assert status < 500 or status == 501, reply.text
        check_server()

    send()
    assert {200, 400} <= answered
