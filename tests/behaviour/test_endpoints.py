# SPDX-License-Identifier: Apache-2.0
"""`vllm serve`: who asks gets rows or a 400, by every spelling, on every endpoint.

The table is `tests/endpoints.py`.
"""

from __future__ import annotations

import copy
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest

from examples.client import decode_rows
from harness.lines import LINES
from harness.process import ENVIRONMENT
from harness.server import ARGUMENTS, Server
from tests import endpoints
from tests.endpoints import (
    ASK,
    ENDPOINTS,
    LAST,
    PASSED,
    PROMPT,
    REFUSED,
    ROWS,
    SERVED,
    WAYS,
    Endpoint,
)
from tests.real import PROJECT

pytestmark = pytest.mark.slow

OPT_IN = ["--routed-experts-opt-in"]

each_endpoint = pytest.mark.parametrize("endpoint", ENDPOINTS, ids=lambda e: e.name.strip("`"))
each_cell = pytest.mark.parametrize(
    ("endpoint", "way", "stream"),
    [
        pytest.param(e, way, stream, id=f"{e.name} {'.'.join(way) or 'field'} {stream}")
        for e in ENDPOINTS
        for way in e.ways
        for stream in ([False, True] if e.stream else [False])
    ],
)
with_rows = [endpoint for endpoint in ENDPOINTS if endpoint.what == ROWS]


@pytest.fixture(scope="module", params=[[], OPT_IN], ids=["all", "opt-in"])
def arguments(request: pytest.FixtureRequest) -> list[str]:
    return ["--enable-return-routed-experts", "--enforce-eager", *request.param]


@pytest.fixture(scope="module")
def server(
    model: Path, arguments: list[str], line: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("server") / "server.log"
    with Server(model, log=log, args=arguments, env=endpoints.ENVIRONMENT, line=line) as server:
        yield server


@pytest.fixture(autouse=True)
def skip_what_is_not_served(request: pytest.FixtureRequest, line: str) -> None:
    params = getattr(getattr(request.node, "callspec", None), "params", {})
    if "endpoint" in params and not params["endpoint"].is_served(line):
        pytest.skip("this server has no such endpoint")


def send(
    server: Server,
    endpoint: Endpoint,
    *given: tuple[tuple[str, ...], dict[str, Any]],
    stream: bool = False,
) -> httpx.Response:
    """POST the endpoint's request, with arguments in some of its objects."""
    body: dict[str, Any] = {"model": server.checkpoint, **copy.deepcopy(endpoint.body)}
    if stream:
        body["stream"] = True
    for way, arguments in given:
        endpoints.put(body, way, arguments)
    return httpx.post(server.url + endpoint.path, json=body, timeout=120, trust_env=False)


def read_chunks(reply: httpx.Response) -> list[dict[str, Any]]:
    """The choices of a stream's chunks, or of a whole answer."""
    if not reply.headers["content-type"].startswith("text/event-stream"):
        return list(reply.json()["choices"])
    lines = [line.removeprefix("data: ") for line in reply.text.splitlines()]
    events = [json.loads(line) for line in lines if line.startswith("{")]
    assert not any("error" in event for event in events), reply.text
    return [choice for event in events for choice in event.get("choices", [])]


def count_rows(choices: list[dict[str, Any]]) -> int:
    """The number of rows, which must be consecutive."""
    parts = [choice for choice in choices if choice.get("routed_experts")]
    for choice, following in pairwise(parts):
        rows = decode_rows(choice["routed_experts"])
        assert following["routed_experts_start"] == choice["routed_experts_start"] + len(rows)
    return sum(len(decode_rows(choice["routed_experts"])) for choice in parts)


def assert_rows(endpoint: Endpoint, choices: list[dict[str, Any]]) -> None:
    first = next(choice for choice in choices if choice.get("routed_experts"))
    assert first["routed_experts_start"] == 0
    num_tokens = first["num_prompt_tokens"] + 4
    if "messages" not in endpoint.body:
        assert first["num_prompt_tokens"] == len(PROMPT)
        assert count_rows(choices) == num_tokens - 1
    else:
        assert 0 < count_rows(choices) <= num_tokens - 1


@each_cell
def test_who_asks_gets_rows_or_a_refusal_that_names_the_endpoint(
    server: Server, line: str, endpoint: Endpoint, way: tuple[str, ...], stream: bool
) -> None:
    reply = send(server, endpoint, (way, {ASK: 1}), stream=stream)
    expected = endpoint.what
    if expected == REFUSED:
        assert reply.status_code == 400, reply.text
        name = "eam search" if "use_beam_search" in endpoint.body else endpoint.path
        assert ASK in reply.text
        assert name in reply.text
        return
    assert reply.status_code == 200, reply.text
    if expected == PASSED:
        (rendered,) = reply.json() if isinstance(reply.json(), list) else [reply.json()]
        rendered.pop("request_id")
        answer = httpx.post(
            server.url + "/inference/v1/generate", json=rendered, timeout=120, trust_env=False
        )
        assert answer.status_code == 200, answer.text
        assert count_rows(read_chunks(answer)) > 0
        return
    if expected == SERVED:
        assert "routed_experts" not in reply.text
        return
    assert expected == ROWS
    assert_rows(endpoint, read_chunks(reply))


@pytest.mark.parametrize(
    "endpoint", [e for e in ENDPOINTS if e.what == PASSED], ids=lambda e: e.name.strip("`")
)
def test_rendered_request_asks_for_the_rows_of_the_prompt(
    server: Server, line: str, endpoint: Endpoint
) -> None:
    if not LINES[line].tests["renders_prompt_rows"]:
        pytest.skip("the rendered request has no `kv_transfer_params`")
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


@each_endpoint
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_silent_request_is_captured_only_where_it_gets_rows(
    server: Server, arguments: list[str], line: str, endpoint: Endpoint, stream: bool
) -> None:
    if stream and not endpoint.stream:
        pytest.skip("does not stream")
    if endpoint.path in LINES[line].tests["ends_engine"]:
        pytest.skip("ends the engine of the release too")

    def read() -> float:
        return server.metric("vllm:routed_experts_rows_total") or 0.0

    before = read()
    reply = send(server, endpoint, stream=stream)
    assert reply.status_code == endpoint.silent, reply.text
    gets_rows = endpoint.what == ROWS and "--routed-experts-opt-in" not in arguments
    if stream and not LINES[line].tests["silent_streams"]:
        gets_rows = gets_rows and endpoint.path == "/inference/v1/generate"
    assert (read() > before) == gets_rows
    if endpoint.what == ROWS:
        assert (count_rows(read_chunks(reply)) > 0) == gets_rows
    else:
        assert '"routed_experts":"' not in reply.text.replace(" ", "")


@pytest.mark.parametrize("way", [0, -1], ids=["first way", "last way"])
@pytest.mark.parametrize("endpoint", with_rows, ids=lambda e: e.path)
def test_rows_come_with_the_last_chunk_if_asked(
    server: Server, endpoint: Endpoint, way: int
) -> None:
    place = endpoint.ways[way]
    reply = send(server, endpoint, (place, {ASK: True, LAST: 1}), stream=True)
    choices = read_chunks(reply)
    assert len(choices) > 1
    (last,) = [choice for choice in choices if choice.get("routed_experts")]
    assert last["finish_reason"] is not None
    assert_rows(endpoint, choices)
    whole = send(server, endpoint, (place, {ASK: True, LAST: 1}))
    assert_rows(endpoint, read_chunks(whole))
    spread = send(server, endpoint, (place, {ASK: True, LAST: 0}), stream=True)
    assert sum(bool(choice.get("routed_experts")) for choice in read_chunks(spread)) > 1


def find_errors(server: Server) -> list[str]:
    """The first lines of its log that show an error of the engine, or an answer of status 500. The
    API server logs where each refusal was raised: this is no error."""
    lines = server.log.read_text(errors="replace").splitlines()
    assert any(line.startswith("(EngineCore") for line in lines)
    assert any('" 200 ' in line for line in lines)
    wrong = re.compile(
        r"\((EngineCore|Worker).*(\bERROR\b|Traceback)|.*\b500 Internal Server Error"
    )
    return [line for line in lines if wrong.match(line)][:5]


def test_log_names_no_error(server: Server) -> None:
    """After all requests of this module."""
    assert find_errors(server) == []


OFFLINE = """
import json, sys
from vllm import LLM, SamplingParams
from vllm.sampling_params import BeamSearchParams
llm = LLM(sys.argv[1], enable_return_routed_experts=True, routed_experts_opt_in=True,
          enforce_eager=True, dtype="float32", max_model_len=512,
          kv_cache_memory_bytes=64 << 20, **json.loads(sys.argv[2]))
prompt = {"prompt_token_ids": [31, 17, 200, 45]}
message = [{"role": "user", "content": "abc"}]
ask = {"return_routed_experts": True}
counts = []
for arguments in ({}, ask, {"extra_args": ask}):
    params = SamplingParams(max_tokens=4, ignore_eos=True, **arguments)
    for output in llm.generate(prompt, params) + llm.chat(message, params):
        rows = output.outputs[0].routed_experts
        missing = len(output.prompt_token_ids) + 3
        counts.append(None if rows is None else len(rows) - missing)
llm.beam_search([prompt], BeamSearchParams(beam_width=2, max_tokens=2))
print("counts", json.dumps(counts))
"""


def run_program(line: str, *command: str) -> str:
    """Run a program of this line's vLLM to its end, and return what it prints."""
    env = {**os.environ, **ENVIRONMENT, **LINES[line].variables()}
    done = subprocess.run(
        [sys.executable, *command], text=True, capture_output=True, timeout=900, env=env
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_offline_requests_get_rows_if_they_ask(model: Path, line: str) -> None:
    printed = run_program(line, "-c", OFFLINE, str(model), json.dumps(LINES[line].engine))
    (counts,) = [text for text in printed.splitlines() if text.startswith("counts ")]
    assert json.loads(counts.removeprefix("counts ")) == [None, None, 0, 0, 0, 0]


def test_requests_of_a_batch_file_get_rows_if_they_ask(
    model: Path, line: str, tmp_path: Path
) -> None:
    asks: list[dict[str, Any]] = [{}, {ASK: True}, {"vllm_xargs": {ASK: 1}}]
    lines = [
        {
            "custom_id": str(i),
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": {"model": str(model), **endpoints.CHAT, **ask},
        }
        for i, ask in enumerate(asks)
    ]
    given, answers = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    given.write_text("".join(json.dumps(text) + "\n" for text in lines))
    run_program(
        line,
        *("-m", "vllm.entrypoints.cli.main", "run-batch"),
        *("-i", str(given), "-o", str(answers), "--model", str(model)),
        *(*ARGUMENTS, *LINES[line].options, "--enforce-eager"),
        *("--enable-return-routed-experts", "--routed-experts-opt-in"),
    )
    bodies = [json.loads(text)["response"]["body"] for text in answers.read_text().splitlines()]
    assert [count_rows(body["choices"]) > 0 for body in bodies] == [False, True, True]


def test_documentation_has_this_table() -> None:
    page = (PROJECT.root / "docs" / "endpoints.md").read_text()
    rows = [
        " | ".join([e.name, ", ".join(WAYS[way] for way in e.ways), *map(e.on, LINES)])
        for e in ENDPOINTS
    ]
    assert "".join(f"| {row} |\n" for row in rows) in page
