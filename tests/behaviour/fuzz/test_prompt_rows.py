# SPDX-License-Identifier: Apache-2.0
"""Prompt rows in `kv_transfer_params` that no prefill engine sends harm no server."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, seed
from hypothesis import strategies as st

from harness.lines import LINES
from harness.server import Server
from tests import endpoints
from tests.behaviour.fuzz.requests import BODIES, FUZZ, JSON, SEED, post

pytestmark = pytest.mark.slow

KEY = "prompt_routed_experts"
ASK = endpoints.ASK
FLAGS = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
PATHS = pytest.mark.parametrize("path", BODIES)


def send(server: Server, path: str, carrier: str, **more: Any) -> tuple[int, str]:
    """Send a request that asks for rows, with prompt rows: JSON or nearly so."""
    params = {"kv_transfer_params": {KEY: "<rows>"}, ASK: True}
    body = json.dumps({"model": server.checkpoint, **params, **BODIES[path], **more})
    return post(server, path, body.replace('"<rows>"', carrier))


def get_valid(server: Server, path: str) -> dict[str, Any]:
    """The rows of this server for the prompt, as a prefill engine returns them."""
    status, text = send(server, path, "true")
    assert status == 200, text
    carrier: dict[str, Any] = json.loads(text)["kv_transfer_params"][KEY]
    return carrier


def to_text(file: bytes) -> str:
    return base64.b64encode(file).decode()


# Which other values are refused is tested in the patches.
BAD = ('"abc"', "5", "[1]", '{"routed_experts": "%%", "routed_experts_start": 0}')


@FLAGS
@PATHS
def test_prompt_rows_that_cannot_be_the_prompts_are_a_400_with_one_sentence(
    server: Server, check_server: Callable[[], None], path: str, stream: bool
) -> None:
    for carrier in BAD:
        status, text = send(server, path, carrier, stream=stream)
        assert status == 400, (carrier, status, text[:500])
        # vLLM adds the parameter's name in brackets.
        message = json.loads(text)["error"]["message"].partition(" (parameter=")[0]
        assert f"kv_transfer_params.{KEY}" in message, message
        assert message.endswith("."), message
        assert ". " not in message.replace("...", ""), message
    check_server()


@pytest.mark.parametrize("endpoint", endpoints.ENDPOINTS, ids=lambda e: e.name.strip("`"))
def test_prompt_rows_of_any_value_do_no_harm_on_any_endpoint(
    server: Server, line: str, check_server: Callable[[], None], endpoint: endpoints.Endpoint
) -> None:
    if endpoint.path in LINES[line].tests["ends_engine"]:
        pytest.skip("ends the engine of the release too")
    valid = get_valid(server, "/v1/completions")
    file = base64.b64decode(valid["routed_experts"])
    changed = st.builds(
        lambda at, bits, end: to_text(file[:at] + bytes([file[at] ^ bits]) + file[at + 1 : end]),
        st.integers(0, len(file) - 1),
        st.integers(0, 255),
        st.none() | st.integers(0, len(file)),
    )
    fields = {"routed_experts": changed | JSON, "routed_experts_start": st.integers(-2, 9) | JSON}
    fields["routed_experts_weights"] = changed | JSON
    asks_weights = endpoint.what == endpoints.ROWS and LINES[line].tests["returns_weights"]
    carriers = JSON | st.fixed_dictionaries({}, optional=fields)
    params = JSON | st.fixed_dictionaries({KEY: carriers}, optional={"do_remote_decode": JSON})

    @seed(SEED)
    @FUZZ
    @given(
        params=params,
        stream=st.booleans() if endpoint.stream else st.just(False),
        weights=st.booleans() if asks_weights else st.just(False),
    )
    def check(params: Any, stream: bool, weights: bool) -> None:
        body = {"model": server.checkpoint, **endpoint.body, "kv_transfer_params": params}
        if weights:
            body[endpoints.WEIGHTS] = True
        if stream:
            body["stream"] = True
        status, text = post(server, endpoint.path, json.dumps(body))
        assert status < 500, (params, text[:500])

    check()
    check_server()
