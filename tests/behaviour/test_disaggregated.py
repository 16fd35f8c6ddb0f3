# SPDX-License-Identifier: Apache-2.0
"""The proxy passes what the prefill engine returned to the decode engine, and its answer on.

With stand-ins for the engines. With engines: test_disaggregated_engines.py.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from examples import proxy
from harness.lines import LINES, installed
from harness.process import Kept, free_port
from tests.real import PROJECT
from tests.stub import Stub

GENERATE = proxy.GENERATE
PROMPT = [5, 6, 7, 8, 9]
# vLLM's own proxy for Mooncake.
EXAMPLES = LINES[installed()].tests["proxies"]
MOONCAKE = PROJECT.tree / EXAMPLES / "mooncake_connector/mooncake_connector_proxy.py"


def choice(index: int = 0) -> dict[str, Any]:
    return {"index": index, "token_ids": [10, 11, 12], "finish_reason": "length"}


@contextmanager
def standing(prefill: Stub, decode: Stub) -> Iterator[str]:
    with prefill.running(), decode.running(), proxy.running(prefill.url, decode.url) as url:
        yield url


def prefilled(*choices: dict[str, Any], **fields: Any) -> Stub:
    return Stub({"choices": [*(choices or [choice()])], **fields})


def ask(url: str, **body: Any) -> httpx.Response:
    body = {"token_ids": PROMPT, "sampling_params": {"max_tokens": 3}, **body}
    return post(url, GENERATE, body)


def post(url: str, path: str, body: dict[str, Any]) -> httpx.Response:
    return httpx.post(url + path, json=body, trust_env=False, timeout=60)


def test_answer_of_the_decode_engine_passes() -> None:
    decode = Stub({"choices": [choice()]})
    with standing(prefilled(), decode) as url:
        reply = ask(url)
    assert reply.status_code == 200
    assert reply.json() == decode.answer


@pytest.mark.parametrize(
    ("path", "body", "short"),
    [
        (
            GENERATE,
            {"sampling_params": {"max_tokens": 9, "n": 3, "seed": 1}, "stream": True},
            {"sampling_params": {"max_tokens": 1, "min_tokens": 1, "n": 1, "seed": 1}},
        ),
        (
            "/v1/completions",
            {"prompt": "a", "max_tokens": 9, "n": 2, "vllm_xargs": {"return_routed_experts": 1}},
            {"prompt": "a", "max_tokens": 1, "min_tokens": 1, "n": 1}
            | {"vllm_xargs": {"return_routed_experts": 1}},
        ),
        (
            "/v1/chat/completions",
            {"messages": [], "max_completion_tokens": 9, "stream_options": {"include_usage": True}},
            {"messages": [], "max_tokens": 1, "min_tokens": 1, "n": 1},
        ),
    ],
)
def test_prefill_engine_is_asked_for_one_token(
    path: str, body: dict[str, Any], short: dict[str, Any]
) -> None:
    prefill, decode = prefilled(), Stub({"choices": []})
    with standing(prefill, decode) as url:
        post(url, path, body)
    remote = {"do_remote_decode": True, "prompt_routed_experts": True}
    assert prefill.sent == [{"path": path, **short, "stream": False, "kv_transfer_params": remote}]
    remote = {"do_remote_prefill": True}
    assert decode.sent == [{"path": path, **body, "kv_transfer_params": remote}]


def test_decode_engine_gets_what_the_connector_answered() -> None:
    params = {"do_remote_prefill": True, "remote_block_ids": [[1, 2]], "remote_host": "x"}
    decode = Stub({"choices": [choice()]})
    with standing(prefilled(kv_transfer_params=params), decode) as url:
        ask(url)
    assert decode.sent[0]["kv_transfer_params"] == params


def test_rows_pass_where_the_connector_returns_nothing() -> None:
    params = {"prompt_routed_experts": {"routed_experts": "abc"}}
    decode = Stub({"choices": [choice(), choice(1)]})
    with standing(prefilled(kv_transfer_params=params), decode) as url:
        assert ask(url, sampling_params={"max_tokens": 3, "n": 2}).status_code == 200
    assert decode.sent[0]["kv_transfer_params"] == {"do_remote_prefill": True, **params}


@contextmanager
def bootstrap(*engine_ids: str) -> Iterator[int]:
    """vLLM's bootstrap server of Mooncake, where data parallel ranks have registered; its port."""
    from vllm.distributed.kv_transfer.kv_connector.v1.mooncake import mooncake_utils

    port = free_port()
    server = mooncake_utils.MooncakeBootstrapServer("127.0.0.1", port)
    server.start()
    try:
        for rank, engine_id in enumerate(engine_ids):
            worker = {"engine_id": engine_id, "addr": "tcp://127.0.0.1:1"}
            ranks = {"dp_rank": rank, "tp_rank": 0, "pp_rank": 0}
            post(f"http://127.0.0.1:{port}", "/register", worker | ranks).raise_for_status()
        yield port
    finally:
        server.shutdown()


def test_mooncake_gets_the_parameters_of_vllms_own_proxy(tmp_path: Path) -> None:
    prefill, decode = prefilled(), Stub({"choices": [choice()]})
    body = {"prompt": PROMPT, "max_tokens": 3}
    with prefill.running(), decode.running(), bootstrap("engine") as port:
        with proxy.running(prefill.url, decode.url, f"http://127.0.0.1:{port}") as url:
            assert post(url, "/v1/completions", body).status_code == 200
        theirs = free_port()
        command = [*(sys.executable, str(MOONCAKE), "--port", str(theirs)), "--decode", decode.url]
        with Kept([*command, "--prefill", prefill.url, str(port)], tmp_path / "log"):
            end = time.monotonic() + 60
            while min(len(prefill.sent), len(decode.sent)) < 2:
                assert time.monotonic() < end, (tmp_path / "log").read_text()
                time.sleep(0.1)
                with suppress(httpx.HTTPError):
                    post(f"http://127.0.0.1:{theirs}", "/v1/completions", body)
    assert prefill.sent[0]["kv_transfer_params"].pop("prompt_routed_experts") is True
    for engine in (prefill, decode):
        ours, vllms = (request["kv_transfer_params"] for request in engine.sent[:2])
        assert {**ours, "transfer_id": vllms["transfer_id"]} == vllms
    first, second = (engine.sent[0]["kv_transfer_params"] for engine in (prefill, decode))
    assert first["transfer_id"] == second["transfer_id"]


@pytest.mark.parametrize("engine_ids", [(), ("one", "two")])
def test_mooncake_without_one_engine_is_refused(engine_ids: tuple[str, ...]) -> None:
    prefill = prefilled()
    with (
        prefill.running(),
        bootstrap(*engine_ids) as port,
        proxy.running(prefill.url, prefill.url, f"http://127.0.0.1:{port}") as url,
    ):
        reply = ask(url)
    assert reply.status_code == 502
    assert "does not name one prefill engine" in reply.json()["error"]["message"]
    assert not prefill.sent


@pytest.mark.parametrize("count", [{"n": 2}, {"prompt": [PROMPT, PROMPT]}])
def test_kv_of_one_prompt_is_not_given_to_several_choices(count: dict[str, Any]) -> None:
    choices = [choice(i) for i in range(len(count.get("prompt", [1])))]
    prefill = prefilled(*choices, kv_transfer_params={"remote_block_ids": [1]})
    decode = Stub({"choices": []})
    with standing(prefill, decode) as url:
        reply = post(url, "/v1/completions", {"prompt": PROMPT, "max_tokens": 3, **count})
    assert reply.status_code == 400
    assert "for 2 choices" in reply.json()["error"]["message"]
    assert not decode.sent


def test_refusal_of_an_engine_is_passed_on() -> None:
    refusal = {"error": {"message": "max_tokens is -1", "code": 400}}
    for pair in ((Stub(refusal, status=400), Stub({})), (prefilled(), Stub(refusal, status=400))):
        with standing(*pair) as url:
            reply = ask(url)
        assert (reply.status_code, reply.json()) == (400, refusal)


def test_many_requests_are_answered_at_once() -> None:
    count = 120
    prefill, decode = prefilled(), Stub({"choices": [choice()]})
    prefill.together = count
    with standing(prefill, decode) as url, ThreadPoolExecutor(count) as pool:
        replies = list(pool.map(ask, [url] * count))
    assert [reply.status_code for reply in replies] == [200] * count


@pytest.mark.parametrize("body", ["{", "[]", '{"sampling_params": 1}'])
def test_body_that_cannot_be_read_is_refused(body: str) -> None:
    with standing(prefilled(), prefilled()) as url:
        reply = httpx.post(url + GENERATE, content=body, trust_env=False, timeout=120)
    assert reply.status_code == 400
    assert "is no JSON object" in reply.json()["error"]["message"]
