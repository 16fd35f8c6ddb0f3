# SPDX-License-Identifier: Apache-2.0
"""No request stops the server of this line or harms the next one.

Requests and helpers are those of the first line's `tests/behaviour/test_fuzz.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, assume, given, seed, settings
from hypothesis import strategies as st

from harness import oracle
from harness.server import Server
from tests import endpoints
from tests.behaviour.test_fuzz import (
    ARGUMENTS,
    ENDPOINTS,
    FIELDS,
    HOSTILE,
    KNOWN,
    OBJECTS,
    PLACES,
    SEED,
    any_server,
    assert_rows_only_if_asked,
    find,
    opt_in_server,
    post,
    streamed_error,
    test_arguments_of_any_value_do_no_harm_on_any_endpoint,
    test_log_names_no_error,
    test_log_of_the_server_with_opt_in_names_no_error,
    write_body,
)
from tests.carriers import (
    server_without_rows,
    test_prompt_rows_at_a_server_without_rows_do_no_harm,
    test_prompt_rows_for_several_readers_are_a_400,
    test_prompt_rows_of_any_value_do_no_harm_on_any_endpoint,
    test_prompt_rows_of_who_gets_none_do_no_harm,
    test_prompt_rows_that_cannot_be_the_prompts_are_a_400_with_one_sentence,
    test_prompt_rows_that_say_nothing_or_what_is_known_are_taken,
)

# These tests and fixtures run here as they are.
__all__ = [
    "any_server",
    "opt_in_server",
    "server_without_rows",
    "test_arguments_of_any_value_do_no_harm_on_any_endpoint",
    "test_log_names_no_error",
    "test_log_of_the_server_with_opt_in_names_no_error",
    "test_prompt_rows_at_a_server_without_rows_do_no_harm",
    "test_prompt_rows_for_several_readers_are_a_400",
    "test_prompt_rows_of_any_value_do_no_harm_on_any_endpoint",
    "test_prompt_rows_of_who_gets_none_do_no_harm",
    "test_prompt_rows_that_cannot_be_the_prompts_are_a_400_with_one_sentence",
    "test_prompt_rows_that_say_nothing_or_what_is_known_are_taken",
]

pytestmark = pytest.mark.slow

LINE = Path(__file__).parent.name
EXAMPLES = 40
# Where the arguments of a request from the schema stand.
WAYS: dict[str, tuple[str, ...]] = {
    "/inference/v1/generate": ("sampling_params",),
    "/v1/completions": (),
    "/v1/chat/completions": (),
}


@pytest.fixture(scope="module")
def line() -> str:
    return LINE


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    arguments = ["--enable-return-routed-experts", "--max-model-len=64", "--enforce-eager"]
    log = tmp_path_factory.mktemp("server") / "server.log"
    env = {**endpoints.ENVIRONMENT, "VLLM_MAX_N_SEQUENCES": "4"}
    with Server(model, log=log, args=arguments, env=env, line=LINE) as server:
        yield server


@pytest.fixture(scope="module")
def check_server(server: Server, model: Path) -> Callable[[], None]:
    """Checks that the server is alive and right."""
    probe = list(range(5, 14))
    first = server.generate(probe, max_tokens=3)
    routes = oracle.route(model, [*probe, *first.token_ids])

    def check() -> None:
        answer = server.generate(probe, max_tokens=3)
        assert answer.token_ids == first.token_ids
        assert answer.rows is not None
        assert oracle.compare(answer.rows, routes).agree == len(answer.rows)

    return check


@pytest.mark.parametrize(("path", "place"), PLACES)
def test_hostile_value_is_a_400_that_names_the_argument(
    server: Server, check_server: Callable[[], None], path: str, place: tuple[str, ...]
) -> None:
    for name, arguments in (hostile.values for hostile in HOSTILE):
        for stream in (False, True):
            body = write_body(server, path, place, str(arguments), stream=stream)
            status, text = post(server, path, body)
            assert status == 400, (arguments, text)
            assert str(name) in text, (arguments, text)
    check_server()


@pytest.mark.parametrize("path", WAYS)
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
            case.body.update(model=server.checkpoint, **ENDPOINTS[path])
            find(case.body, WAYS[path]).update(arguments)
        if isinstance(case.body, dict):
            assume(not any(known(case.body) for known in KNOWN.values()))
        reply = case.call(timeout=120)
        answered.add(reply.status_code)
        status = streamed_error(reply.text) or reply.status_code
        # 501 is the answer to, say, a file within a message.
        assert status < 500 or status == 501, reply.text
        ways = (OBJECTS[path], *FIELDS[path])
        assert_rows_only_if_asked(False, case.body, ways, reply.text)
        check_server()

    send()
    assert {200, 400} <= answered
