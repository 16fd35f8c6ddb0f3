# SPDX-License-Identifier: Apache-2.0
"""The table of endpoints, walked with servers of this line."""

import httpx
import pytest

from examples.client import decode_rows
from harness.server import Server
from tests import endpoints
from tests.behaviour.test_endpoints import *  # noqa: F403
from tests.behaviour.test_endpoints import send
from tests.endpoints import ASK, ENDPOINTS, PASSED, Endpoint

RENDERERS = [endpoint for endpoint in ENDPOINTS if endpoint.lines["v0.33.0"] == PASSED]


@pytest.mark.parametrize("endpoint", RENDERERS, ids=lambda e: e.name.strip("`"))
def test_rendered_request_asks_for_the_rows_of_the_prompt(
    server: Server, endpoint: Endpoint
) -> None:
    params = {"kv_transfer_params": {"prompt_routed_experts": True}}
    reply = send(server, endpoint, (endpoints.FIELD, {ASK: True, **params}))
    (rendered,) = reply.json() if isinstance(reply.json(), list) else [reply.json()]
    answer = httpx.post(
        server.url + "/inference/v1/generate",
        json={**rendered, "stream": False},
        timeout=120,
        trust_env=False,
    ).json()
    prompt = answer["kv_transfer_params"]["prompt_routed_experts"]
    assert len(decode_rows(prompt["routed_experts"])) == len(rendered["token_ids"])
