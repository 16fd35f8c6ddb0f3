# SPDX-License-Identifier: Apache-2.0
"""No request stops the server or harms the next one.

Requests come from the running server's own OpenAPI schema (schemathesis), with any value of the
arguments. After each, the server must answer a plain request with true rows. The same seed makes
the same requests. Which values are refused is tested in the patches.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from hypothesis import given, seed, settings
from hypothesis import strategies as st
from schemathesis.specs.openapi.checks import response_schema_conformance

from harness.lines import LINES
from harness.server import Server
from tests import endpoints
from tests.behaviour.fuzz.conftest import weights_flag
from tests.behaviour.fuzz.requests import BODIES, FUZZ, JSON, PROMPT, SEED, post, streamed_error
from tests.behaviour.test_endpoints import find_errors

pytestmark = pytest.mark.slow

# Objects of their own for the arguments. In others, they stand beside fields of the request.
OWN = (endpoints.XARGS, endpoints.EXTRA)
# The last way of each is an object of its own. /inference/v1/generate ignores `vllm_xargs` that are
# no object.
WAYS = {path: endpoints.find(path).ways for path in BODIES}
ASK = endpoints.ASK
START = endpoints.START
LAST = endpoints.LAST
WEIGHTS = endpoints.WEIGHTS
# Rows are text.
HAS_ROWS = re.compile(r'"routed_experts": ?"')
HAS_WEIGHTS = re.compile(r'"routed_experts_weights": ?"')


# Fields that are not sent, because the pinned release answers some of their values with status 500.
KNOWN = {
    "bad_words",  # a blank one: IndexError in SamplingParams.update_from_tokenizer
    "features",  # for a model that takes none: KeyError in InputProcessor.process_inputs
    "response_format",  # a structural tag of another form: AssertionError in to_sampling_params
    "tool_calls",  # one that is no function: KeyError in chat_utils._postprocess_messages
    "trace_decode_token_ids",  # empty, or n > 1: ValueError in _validate_trace_replay
}


def without_known(value: Any) -> Any:
    """A JSON value without the fields of `KNOWN`."""
    if isinstance(value, dict):
        return {k: without_known(v) for k, v in value.items() if k not in KNOWN}
    return [without_known(v) for v in value] if isinstance(value, list) else value


# Half of the requests from the schema get these, so that they reach the engine.
ARGUMENTS = st.fixed_dictionaries(
    {},
    optional={
        LAST: st.sampled_from([True, 0, "true", "yes", 2, None]),
        WEIGHTS: st.sampled_from([True, False, 1, "true", "yes", 2, None]),
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
    body: dict[str, Any], server: Server, path: str, arguments: list[dict[str, Any]]
) -> None:
    """Give a generated request the model, a prompt and, in some ways, arguments of the right
    form."""
    body["model"] = server.checkpoint
    for name, value in BODIES[path].items():
        if name == "sampling_params":
            body[name] = {**body[name], **value} if isinstance(body.get(name), dict) else {**value}
        else:
            body[name] = value
    for way, added in zip(WAYS[path], arguments, strict=False):
        if way in OWN:
            endpoints.put(body, way[:-1], {way[-1]: added})
        else:
            endpoints.put(body, way, added)


@pytest.mark.parametrize("path", BODIES)
def test_requests_from_the_schema_do_no_harm(
    server: Server, line: str, check_server: Callable[[], None], path: str
) -> None:
    schema = schemathesis.openapi.from_url(server.url + "/openapi.json")
    answered = set()

    @seed(SEED)
    @settings(FUZZ, max_examples=LINES[line].tests["fuzz_examples"])
    @given(
        case=schema[path]["POST"].as_strategy(),
        arguments=st.lists(ARGUMENTS, max_size=4),
        valid=st.booleans(),
    )
    def send(case: Any, arguments: list[dict[str, Any]], valid: bool) -> None:
        case.body = without_known(case.body)
        if valid and isinstance(case.body, dict):
            repair(case.body, server, path, arguments)
        reply = case.call(timeout=120)
        answered.add(reply.status_code)
        case.validate_response(reply, checks=[response_schema_conformance])
        status = streamed_error(reply.text) or reply.status_code
        # 501 is the answer to, say, a file within a message.
        assert status < 500 or status == 501, f"{reply.text}: {case.body}"
        assert_rows_only_if_asked(False, case.body, WAYS[path], reply.text)
        check_server()

    send()
    assert {200, 400} <= answered


# Any value of any argument. Others are valid, so that requests reach the engine.
ANYTHING = st.one_of(
    st.just({}),
    st.fixed_dictionaries(
        {},
        optional={
            ASK: st.sampled_from([True, 1, "true", False, None]),
            WEIGHTS: st.sampled_from([True, 0, None]),
            START: st.just(0),
        },
    ),
    st.dictionaries(
        st.sampled_from([ASK, START, LAST, WEIGHTS]),
        JSON | st.sampled_from([True, 1, 0, 2]),
        max_size=3,
    ),
)


@pytest.fixture(scope="module", params=["all", "opt-in"])
def any_server(
    request: pytest.FixtureRequest, model: Path, line: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    """A server with all endpoints of the table. With opt-in, its silent requests get no rows."""
    if request.param == "all":
        yield request.getfixturevalue("server")
        return
    arguments = ["--enable-return-routed-experts", "--routed-experts-opt-in"]
    arguments += ["--max-model-len=128", "--enforce-eager", *weights_flag(line)]
    log = tmp_path_factory.mktemp("opt-in") / "server.log"
    with Server(model, log=log, args=arguments, env=endpoints.ENVIRONMENT, line=line) as server:
        yield server


def is_true(value: Any) -> bool:
    # 1.0 equals True.
    return bool(value == 1 or value == "true")


def assert_rows_only_if_asked(
    opted_in: bool, body: Any, ways: Sequence[tuple[str, ...]], text: str
) -> None:
    """No answer has rows if a way of its request declines or, with opt-in, none asks. None has
    weights if no way asks for them."""
    values, asks_weights = [], False
    for way in ways:
        place = body
        for name in way:
            place = place.get(name) if isinstance(place, dict) else None
        if isinstance(place, dict) and place.get(ASK) is not None:
            values.append(place[ASK])
        asks_weights |= isinstance(place, dict) and is_true(place.get(WEIGHTS))
    assert asks_weights or not HAS_WEIGHTS.search(text), text[:500]
    asks = asks_weights or any(map(is_true, values))
    if not asks and (values or opted_in):
        assert not HAS_ROWS.search(text), (values, text[:500])


@pytest.mark.parametrize("endpoint", endpoints.ENDPOINTS, ids=lambda e: e.name.strip("`"))
def test_arguments_of_any_value_do_no_harm_on_any_endpoint(
    any_server: Server, line: str, endpoint: endpoints.Endpoint
) -> None:
    """Nobody gets rows who does not ask, where answers have a place for rows or not."""
    if not endpoint.is_served(line):
        pytest.skip("this server has no such endpoint")
    if endpoint.path in LINES[line].tests["ends_engine"]:
        pytest.skip("ends the engine of the release too")
    opted_in = "--routed-experts-opt-in" in any_server.command
    has_place = endpoint.what == endpoints.ROWS

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
            if arguments := data.draw(ANYTHING):
                endpoints.put(body, way, arguments)
        status, text = post(any_server, endpoint.path, json.dumps(body))
        assert status < 500 or status == endpoint.silent, text
        assert has_place or not HAS_ROWS.search(text), text[:500]
        assert_rows_only_if_asked(opted_in, body, endpoint.ways, text)

    send()
    any_server.generate(PROMPT, max_tokens=1)


def test_log_names_no_error(any_server: Server) -> None:
    """After all requests of this module."""
    assert find_errors(any_server) == []
