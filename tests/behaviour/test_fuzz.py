# SPDX-License-Identifier: Apache-2.0
"""No request stops the server or harms the next one.

Requests come from the running server's own OpenAPI schema (schemathesis) and from a list of hostile
values for the two arguments. After each, the server must answer a plain request with true rows.
The same seed makes the same requests.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from hypothesis import assume, given, seed, settings
from hypothesis import strategies as st
from schemathesis.specs.openapi.checks import response_schema_conformance

from harness import oracle
from harness.lines import FIRST
from harness.server import Server
from tests import endpoints
from tests.behaviour.conftest import CHUNK, random_prompt
from tests.behaviour.test_endpoints import find_errors

# Its tests run here as they are.
from tests.carriers import *  # noqa: F403
from tests.carriers import BODIES, FUZZ, JSON, PROMPT, SEED, post, streamed_error

pytestmark = pytest.mark.slow

# Requests from the schema. The kernels of the second line run in Triton's interpreter.
EXAMPLES = {FIRST: 150, "v0.33.0": 40}
# Where arguments stand: in an object of their own, or as fields of the object named.
OBJECTS = {
    "/inference/v1/generate": ("sampling_params", "extra_args"),
    "/v1/completions": ("vllm_xargs",),
    "/v1/chat/completions": ("vllm_xargs",),
}
FIELDS: dict[str, tuple[tuple[str, ...], ...]] = {
    "/inference/v1/generate": (("sampling_params",), ()),
    "/v1/completions": ((),),
    "/v1/chat/completions": ((),),
}
PLACES = [(path, place) for path in BODIES for place in (OBJECTS[path], *FIELDS[path])]
ASK, START, LAST = endpoints.ASK, endpoints.START, endpoints.LAST
# Rows are text.
HAS_ROWS = re.compile(r'"routed_experts": ?"')


@pytest.fixture(scope="module")
def server(model: Path, line: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    arguments = ["--enable-return-routed-experts", f"--max-num-batched-tokens={CHUNK}"]
    # Long answers and many choices would only take time, as compiling would.
    arguments += ["--max-model-len=64", "--enforce-eager"]
    log = tmp_path_factory.mktemp("server") / "server.log"
    env = {**endpoints.ENVIRONMENT, "VLLM_MAX_N_SEQUENCES": "4"}
    with Server(model, log=log, args=arguments, env=env, line=line) as server:
        yield server


@pytest.fixture(scope="module")
def check_server(server: Server, model: Path) -> Callable[[], None]:
    """Checks that the server is alive and right."""
    probe = random_prompt(2, 9)
    first = server.generate(probe, max_tokens=3)
    routes = oracle.route(model, [*probe, *first.token_ids])

    def check() -> None:
        answer = server.generate(probe, max_tokens=3)
        assert answer.token_ids == first.token_ids
        assert len(answer.rows) == len(probe) + 2
        assert oracle.compare(answer.rows, routes).agree == len(answer.rows)

    return check


def write_body(
    server: Server, path: str, place: tuple[str, ...], arguments: str, stream: bool = False
) -> str:
    """A request whose arguments are the given text, which need not be valid JSON."""
    body = json.loads(json.dumps({"model": server.checkpoint, **BODIES[path], "stream": stream}))
    if place == OBJECTS[path]:
        find(body, place[:-1])[place[-1]] = "<arguments>"
        return json.dumps(body).replace('"<arguments>"', arguments)
    find(body, place)["<arguments>"] = 0
    return json.dumps(body).replace('"<arguments>": 0', arguments[1:-1])


def find(body: dict[str, Any], place: tuple[str, ...]) -> dict[str, Any]:
    for name in place:
        body = body[name]
    return body


def both(name: str, *values: str) -> list[Any]:
    return [pytest.param(name, f'{{"{name}": {v}}}', id=f"{name}={v[:24]}") for v in values]


FLOATS = ("0.0", "1.0", "1.5", "-0.0", "NaN", "Infinity", "-Infinity", "1e400", "1e-400")
HUGE = (str(2**63), str(2**64), str(2**65), str(-(2**65)), "1" + "0" * 400)
OTHERS = ('""', '"yes"', '"1e3"', '"\\u0000"', '"\\ud800"', "[]", "[1]", "[[1]]", "{}", '{"a": 1}')

HOSTILE = [
    *both(ASK, *FLOATS, *HUGE, *OTHERS, "2", "-1", '"TRUE"', '"True"', '"1"', "[true]"),
    *both(ASK, '"' + "x" * 100_000 + '"'),
    *both(LAST, *FLOATS, *HUGE, *OTHERS, "2", '"1"'),
    *both(START, *FLOATS, *HUGE, *OTHERS, "true", "false", "-1", "65", "1000000", '"0"', '"true"'),
    pytest.param(START, f'{{"{START}": 0, "{START}": -1}}', id="the last of two keys is bad"),
    pytest.param(START, f'{{"{ASK}": true, "{START}": 1.5}}', id="one of two arguments is bad"),
    pytest.param(START, f'{{"{ASK}": false, "{START}": -1}}', id="bad though it declines"),
]


@pytest.mark.parametrize(("name", "arguments"), HOSTILE)
def test_hostile_value_is_a_400_that_names_the_argument(
    server: Server, check_server: Callable[[], None], name: str, arguments: str
) -> None:
    for path, place in PLACES:
        for stream in (False, True):
            status, text = post(server, path, write_body(server, path, place, arguments, stream))
            assert status == 400, (path, place, stream, text)
            assert name in text, (path, place, stream)
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
@pytest.mark.parametrize("path", BODIES)
def test_arguments_that_are_none_are_a_400(
    server: Server, check_server: Callable[[], None], path: str, arguments: str
) -> None:
    status, text = post(server, path, write_body(server, path, OBJECTS[path], arguments))
    assert status == 400, text
    check_server()


@pytest.mark.parametrize("arguments", ["null", "{}"])
@pytest.mark.parametrize("path", BODIES)
def test_silence_is_no_object_too(server: Server, path: str, arguments: str) -> None:
    status, text = post(server, path, write_body(server, path, OBJECTS[path], arguments))
    assert status == 200, text
    assert json.loads(text)["choices"][0]["routed_experts_start"] == 0


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


# Requests that end in status 500, or end the server, in the pinned release too: not sent.
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
        LAST: st.sampled_from([True, 0, "true", "yes", 2, None]),
        ASK: st.one_of(st.sampled_from([True, False, 0, 1, "true", None]), st.integers()),
        START: st.one_of(
            st.integers(-1, len(PROMPT) + 1),
            st.floats(allow_nan=False, allow_infinity=False),
            st.booleans(),
            st.text(),
        ),
    },
)


def repair(
    body: dict[str, Any],
    server: Server,
    path: str,
    arguments: dict[str, Any],
    fields: list[dict[str, Any]],
) -> None:
    """Give a generated request the model, a prompt and arguments of the right form."""
    body["model"] = server.checkpoint
    for name, value in BODIES[path].items():
        if name == "sampling_params":
            body[name] = {**body[name], **value} if isinstance(body.get(name), dict) else {**value}
        else:
            body[name] = value
    *outer, last = OBJECTS[path]
    find(body, tuple(outer))[last] = arguments
    for place, added in zip(FIELDS[path], fields, strict=False):
        find(body, place).update(added)


@pytest.mark.parametrize("path", BODIES)
def test_requests_from_the_schema_do_no_harm(
    server: Server, line: str, check_server: Callable[[], None], path: str
) -> None:
    schema = schemathesis.openapi.from_url(server.url + "/openapi.json")
    answered = set()

    @seed(SEED)
    @settings(FUZZ, max_examples=EXAMPLES[line])
    @given(
        case=schema[path]["POST"].as_strategy(),
        arguments=ARGUMENTS,
        fields=st.lists(ARGUMENTS, max_size=2),
        valid=st.booleans(),
    )
    def send(
        case: Any, arguments: dict[str, Any], fields: list[dict[str, Any]], valid: bool
    ) -> None:
        if valid and isinstance(case.body, dict):
            repair(case.body, server, path, arguments, fields)
        if isinstance(case.body, dict):
            assume(not any(known(case.body) for known in KNOWN.values()))
        reply = case.call(timeout=120)
        answered.add(reply.status_code)
        case.validate_response(reply, checks=[response_schema_conformance])
        status = streamed_error(reply.text) or reply.status_code
        # 501 is the answer to, say, a file within a message.
        assert status < 500 or status == 501, reply.text
        ways = (OBJECTS[path], *FIELDS[path])
        assert_rows_only_if_asked(False, case.body, ways, reply.text)
        check_server()

    send()
    assert {200, 400} <= answered


# Any value of any argument. Others are valid, so that requests reach the engine.
ANYTHING = st.one_of(
    st.just({}),
    st.fixed_dictionaries(
        {}, optional={ASK: st.sampled_from([True, 1, "true", False, None]), START: st.just(0)}
    ),
    st.dictionaries(
        st.sampled_from([ASK, START, LAST]), JSON | st.sampled_from([True, 1, 0, 2]), max_size=3
    ),
)


@pytest.fixture(scope="module")
def opt_in_server(
    model: Path, line: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    """A server whose silent requests get no rows. It has all endpoints of the table."""
    arguments = ["--enable-return-routed-experts", "--routed-experts-opt-in"]
    arguments += ["--max-model-len=128", "--enforce-eager"]
    log = tmp_path_factory.mktemp("opt-in") / "server.log"
    with Server(model, log=log, args=arguments, env=endpoints.ENVIRONMENT, line=line) as server:
        yield server


@pytest.fixture(scope="module", params=["all", "opt-in"])
def any_server(request: pytest.FixtureRequest) -> Server:
    name = "server" if request.param == "all" else "opt_in_server"
    server: Server = request.getfixturevalue(name)
    return server


def assert_rows_only_if_asked(
    opted_in: bool, body: Any, ways: Sequence[tuple[str, ...]], text: str
) -> None:
    """No answer has rows if a way of its request declines or, with opt-in, none asks."""
    values = []
    for way in ways:
        place = body
        for name in way:
            place = place.get(name) if isinstance(place, dict) else None
        if isinstance(place, dict) and place.get(ASK) is not None:
            values.append(place[ASK])
    # 1.0 equals True.
    asks = any(value == 1 or value == "true" for value in values)
    if not asks and (values or opted_in):
        assert not HAS_ROWS.search(text), (values, text[:500])


@pytest.mark.parametrize("endpoint", endpoints.ENDPOINTS, ids=lambda e: e.name.strip("`"))
def test_arguments_of_any_value_do_no_harm_on_any_endpoint(
    any_server: Server, line: str, endpoint: endpoints.Endpoint
) -> None:
    """Nobody gets rows who does not ask, where answers have a place for rows or not."""
    if not endpoint.is_served(line):
        pytest.skip("this server has no such endpoint")
    if line in endpoint.ends_engine:
        pytest.skip("ends the engine of the release too")
    opted_in = "--routed-experts-opt-in" in any_server.command
    has_place = endpoint.lines[line] == endpoints.ROWS

    @seed(SEED)
    @FUZZ
    @given(data=st.data(), stream=st.booleans() if endpoint.stream else st.just(False))
    def send(data: st.DataObject, stream: bool) -> None:
        # Two tokens are enough for two chunks. Steps take most of the time of this test.
        text = re.sub(r'(max_(?:output_)?tokens": )4', r"\g<1>2", json.dumps(endpoint.body))
        body = {"model": any_server.checkpoint, **json.loads(text)}
        if stream:
            body["stream"] = True
        for way in endpoint.ways:
            arguments = data.draw(ANYTHING)
            place = body
            for name in way if arguments else ():
                place = place.setdefault(name, {})
            place.update(arguments)
        status, text = post(any_server, endpoint.path, json.dumps(body))
        assert status < 500 or status == endpoint.silent, text
        assert has_place or not HAS_ROWS.search(text), text[:500]
        assert_rows_only_if_asked(opted_in, body, endpoint.ways, text)

    send()
    any_server.generate(PROMPT, max_tokens=1)


def test_log_of_the_server_with_opt_in_names_no_error(opt_in_server: Server) -> None:
    """After all requests of this module."""
    assert find_errors(opt_in_server) == []


def test_log_names_no_error(server: Server) -> None:
    """After all requests of this module."""
    assert find_errors(server) == []
