# SPDX-License-Identifier: Apache-2.0
"""Prompt rows in `kv_transfer_params` that no prefill engine sends harm no server."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, seed
from hypothesis import strategies as st

from examples.client import decode_rows
from harness.lines import LINES
from harness.server import Server
from tests import endpoints
from tests.behaviour.fuzz.requests import BODIES, FUZZ, JSON, PROMPT, SEED, post
from tests.behaviour.test_endpoints import find_errors
from tests.clients.driving import encode

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


def hostile_texts(text: str) -> Iterator[tuple[str, Any]]:
    """Values of `routed_experts` that cannot be rows, from the true one."""
    rows = decode_rows(text)
    file = base64.b64decode(text)
    for name, dtype in (("int32", "i4"), ("int64", "i8"), ("float", "f4"), ("bool", "?")):
        yield name, encode(rows.astype(dtype))
    yield "big-endian", encode(rows.astype(">u2"))
    yield "structured", encode(np.zeros(len(rows), [("a", "u1")]))
    yield "no layers", encode(rows[:, :0])
    yield "a layer more", encode(np.repeat(rows, 2, axis=1))
    yield "two dimensions", encode(rows[0])
    yield "four dimensions", encode(rows[None])
    yield "no dimension", encode(rows[0, 0, 0])
    yield "no top-k", encode(rows[:, :, :0])
    yield "a row more", encode(np.concatenate((rows, rows[:1])))
    yield "ids out of range", encode(np.full_like(rows, 255))
    yield "another order", encode(np.asfortranarray(rows))
    # numpy.load would run code to read these objects.
    yield "objects", encode(np.full(rows.shape, None, dtype=object))
    yield "archive", encode(rows, np.savez)
    lengths = f"({len(rows)}, ".encode()
    for number in (b"99999999999", b"-1", b"1e9", b"'x'", b"None"):
        changed = file.replace(lengths, b"(" + number + b", ")
        yield f"{number.decode()} rows", to_text(changed)
    yield "header that is code", to_text(file[:10] + b"__import__('os')" + file[26:])
    yield "header that is nested", to_text(file[:10] + b"[" * 118 + file[128:])
    yield "version 2.0", encode(rows, partial(np.lib.format.write_array, version=(2, 0)))
    yield "half a header", to_text(file[:60])
    yield "half the rows", to_text(file[: len(file) // 2 + 50])
    yield "more after the rows", to_text(file + b"x")
    yield "cut base64", text[:-1]
    yield "half of it", text[: len(text) // 2]
    yield "twice", text + text
    yield "base64 for URLs", "-_" + text[2:]
    for name in ("", "%%%%", "ä", "\x00", "\ud800", "A", "=", "AAAA" * 600_000, "%" * 2_000_000):
        yield f"text {name[:4]!r} of {len(name)}", name
    yield from (("a number", 5), ("nothing", None), ("a list", [text]), ("an object", {"a": text}))


STARTS = ("null", "true", "-1", "1", "999", "1.0", '"0"', "[]", "{}", "NaN", "1e400", "Infinity")
STARTS += (str(2**63), str(2**65), str(-(2**65)), "1" + "0" * 400)
NESTED = "[" * 400 + "]" * 400
CARRIERS = {
    "a text": '"abc"',
    "a surrogate": '"\\ud800"',
    "a number": "5",
    "a long number": "1" + "0" * 400,
    "a list": "[1]",
    "nested lists": NESTED,
    "nested objects": '{"a":' * 400 + "1" + "}" * 400,
    "an empty object": "{}",
    "a long list": "[" + "1," * 300_000 + "1]",
    "a long text": json.dumps("A" * 2_000_000),
    "a large object": json.dumps({str(i): i for i in range(20_000)}),
}


def hostile(valid: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Names and JSON of prompt rows that cannot be the prompt's, from the true ones."""
    yield from CARRIERS.items()
    for name, text in hostile_texts(valid["routed_experts"]):
        yield name, json.dumps({**valid, "routed_experts": text})
    for start in STARTS:
        text = json.dumps({**valid, "routed_experts_start": "<start>"})
        yield f"start {start[:20]}", text.replace('"<start>"', start)
    for name in ("routed_experts", "routed_experts_start"):
        yield f"no {name}", json.dumps({k: v for k, v in valid.items() if k != name})


@FLAGS
@PATHS
def test_prompt_rows_that_cannot_be_the_prompts_are_a_400_with_one_sentence(
    server: Server, check_server: Callable[[], None], path: str, stream: bool
) -> None:
    for name, carrier in hostile(get_valid(server, path)):
        status, text = send(server, path, carrier, stream=stream)
        assert status == 400, (name, status, text[:500])
        # vLLM adds the parameter's name in brackets.
        message = json.loads(text)["error"]["message"].partition(" (parameter=")[0]
        assert f"kv_transfer_params.{KEY}" in message, (name, message[:500])
        assert len(message) < 500, (name, message[:500])
        assert message.endswith("."), (name, message)
        assert ". " not in message.replace("...", ""), (name, message)
        assert "\n" not in message, (name, message)
    check_server()


@FLAGS
@PATHS
def test_prompt_rows_for_several_readers_are_a_400(
    server: Server, check_server: Callable[[], None], path: str, stream: bool
) -> None:
    carrier = json.dumps(get_valid(server, path))
    params = {"remote_block_ids": [[1]], KEY: "<rows>"}
    sampling: dict[str, Any] = {"n": 2}
    if "inference" in path:
        sampling = {"sampling_params": {"n": 2, "max_tokens": 2}}
    changes: list[dict[str, Any]] = [{"kv_transfer_params": params, **sampling}]
    if path == "/v1/completions":
        changes.append({"prompt": [PROMPT, PROMPT]})
    for change in changes:
        status, text = send(server, path, carrier, stream=stream, **change)
        assert status == 400, text[:500]
        assert KEY in text, text
    check_server()


@FLAGS
@PATHS
def test_prompt_rows_that_say_nothing_or_what_is_known_are_taken(
    server: Server, check_server: Callable[[], None], path: str, stream: bool
) -> None:
    valid = get_valid(server, path)
    odd = {"moe_layers": [[[]]], "num_prompt_tokens": -1, "more": {"a": [None]}}
    empty = encode(decode_rows(valid["routed_experts"])[:0])
    texts = [json.dumps(c) for c in (None, True, False, valid, {**valid, **odd})]
    texts.append(json.dumps({**valid, "routed_experts": empty}))
    for text in texts:
        status, reply = send(server, path, text, stream=stream)
        assert status == 200, (text[:200], reply[:500])
        assert '"routed_experts_start":0' in reply, (text[:200], reply[:500])
    check_server()


@PATHS
def test_prompt_rows_of_who_gets_none_do_no_harm(
    server: Server, check_server: Callable[[], None], path: str
) -> None:
    for name, carrier in hostile(get_valid(server, path)):
        status, text = send(server, path, carrier, return_routed_experts=False)
        assert status in (200, 400), (name, status, text[:500])
        # Rows are text. If an answer has no rows, v0.33.0 writes null.
        assert '"routed_experts":"' not in text, name
    check_server()


@pytest.fixture(scope="module")
def server_without_rows(
    model: Path, line: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    """A server whose flag is off."""
    log = tmp_path_factory.mktemp("server") / "without_rows.log"
    with Server(model, log, ["--max-model-len=64", "--enforce-eager"], line=line) as without:
        yield without


@PATHS
def test_prompt_rows_at_a_server_without_rows_do_no_harm(
    server: Server, server_without_rows: Server, path: str
) -> None:
    for name, carrier in hostile(get_valid(server, path)):
        status, text = send(server_without_rows, path, carrier, return_routed_experts=None)
        assert status in (200, 400), (name, status, text[:500])
        assert '"routed_experts":"' not in text, name
    assert send(server_without_rows, path, "null", return_routed_experts=None)[0] == 200
    assert find_errors(server_without_rows) == []


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
    carriers = JSON | st.fixed_dictionaries({}, optional=fields)
    params = JSON | st.fixed_dictionaries({KEY: carriers}, optional={"do_remote_decode": JSON})

    @seed(SEED)
    @FUZZ
    @given(params=params, stream=st.booleans() if endpoint.stream else st.just(False))
    def check(params: Any, stream: bool) -> None:
        body = {"model": server.checkpoint, **endpoint.body, "kv_transfer_params": params}
        if stream:
            body["stream"] = True
        status, text = post(server, endpoint.path, json.dumps(body))
        assert status < 500, (params, text[:500])

    check()
    check_server()
