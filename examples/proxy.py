# SPDX-License-Identifier: Apache-2.0
"""A proxy for a prefill and a decode engine (P/D disaggregation).

    python -m examples.proxy --prefill URL --decode URL [--mooncake URL] [--port PORT]

The proxy asks the prefill engine for one token. This answer has `kv_transfer_params`, with the rows
of the prompt in them. The proxy passes them to the decode engine, which receives the KV of the
prompt and returns the whole answer with all rows. The proxy supports /inference/v1/generate,
/v1/completions and /v1/chat/completions, streamed or not, with or without rows.

Start both engines with `--enable-return-routed-experts`. Connectors like NIXL's return
`kv_transfer_params` that are valid for one prompt and one choice, so requests for more get status
400. Connectors that find KV by its tokens return none. Then the proxy sends
`{"do_remote_prefill": true}`, and `"prompt_routed_experts": true` makes the prefill engine return
the rows all the same. With Mooncake's connector name the prefill engine's bootstrap server with
`--mooncake`. The proxy then sends what vLLM's example proxy sends, after the prefill engine has
answered.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import threading
import time
import uuid
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from typing import Any

import httpx
import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse

GENERATE = "/inference/v1/generate"
PATHS = (GENERATE, "/v1/completions", "/v1/chat/completions")
# Request headers that the proxy passes to both engines.
HEADERS = ("authorization", "x-request-id")
# Place of the prompt's rows in `kv_transfer_params`. `true` asks the prefill engine for them.
PROMPT_ROWS = "prompt_routed_experts"
# Errors of a body that is no request, for example with `n` of 1e400 or with very deep lists.
UNREADABLE = (ValueError, TypeError, AttributeError, KeyError, OverflowError, RecursionError)


class ProxyError(Exception):
    """The engines cannot be asked; the text says why, in one sentence."""


def prefill_body(path: str, body: Mapping[str, Any]) -> dict[str, Any]:
    """The request for the prefill engine: the same prompts, one token each, not streamed."""
    # min_tokens too: a request that ends with a stop token sends no KV.
    short = {"max_tokens": 1, "min_tokens": 1, "n": 1}
    params = {"do_remote_decode": True, PROMPT_ROWS: True}
    made = {**body, "stream": False, "kv_transfer_params": params}
    made.pop("stream_options", None)
    if path == GENERATE:
        return {**made, "sampling_params": {**body["sampling_params"], **short}}
    made.pop("max_completion_tokens", None)  # chat's other name for max_tokens
    return {**made, **short}


def decode_body(
    body: Mapping[str, Any], prefilled: Mapping[str, Any], remote: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """The request for the decode engine: the original one, with the KV and the rows of the prompt.
    `remote` says where the KV is, if the prefill engine's answer does not."""
    params = prefilled.get("kv_transfer_params") or {}
    if not connector_params(prefilled):
        params = {**params, **(remote or {"do_remote_prefill": True})}
    return {**body, "kv_transfer_params": params}


def connector_params(prefilled: Mapping[str, Any]) -> dict[str, Any]:
    """What the KV connector returned with the prefill engine's answer; empty if nothing."""
    params = prefilled.get("kv_transfer_params") or {}
    return {name: value for name, value in params.items() if name != PROMPT_ROWS}


async def mooncake_params(
    client: httpx.AsyncClient, bootstrap: str
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The `kv_transfer_params` for the prefill and for the decode engine of one request, from the
    prefill engine's bootstrap server. Raises ProxyError if it does not name one engine."""
    reply = await client.get(f"{bootstrap}/query")
    try:
        (rank,) = reply.raise_for_status().json().values()
        engine_id = rank["engine_id"]
    except (AttributeError, KeyError, TypeError, ValueError) as e:
        raise ProxyError(
            f"Mooncake's bootstrap server {bootstrap} does not name one prefill engine without "
            f"data parallel ranks: {reply.text[:200]}"
        ) from e
    transfer = {"transfer_id": f"xfer-{uuid.uuid4()}"}
    return (
        {"do_remote_decode": True, "do_remote_prefill": False, PROMPT_ROWS: True, **transfer},
        {
            "do_remote_decode": False,
            "do_remote_prefill": True,
            "remote_bootstrap_addr": bootstrap,
            "remote_engine_id": engine_id,
            **transfer,
        },
    )


def make_app(prefill: str, decode: str, mooncake: str | None = None) -> FastAPI:
    """Make the proxy for two engines, and for the prefill engine's bootstrap server if its
    connector is Mooncake's."""

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        # Engines are in the same network: ignore a proxy of the environment. They may take long,
        # for many requests at once. Never reuse a connection: vLLM closes it after a refusal
        # without notice, and the next request would fail.
        async with httpx.AsyncClient(
            timeout=httpx.Timeout(None, connect=10),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
            trust_env=False,
        ) as client:
            app.state.client = client
            yield

    app = FastAPI(lifespan=lifespan)

    async def answer(request: Request) -> Response:
        path, client = request.url.path, request.app.state.client
        try:
            body = await request.json()
            n = int((body["sampling_params"] if path == GENERATE else body).get("n") or 1)
            first_body = prefill_body(path, body)
        except UNREADABLE as e:
            return _error(400, f"the request is no JSON object of this endpoint: {e!r}")
        headers = {name: request.headers[name] for name in HEADERS if name in request.headers}
        headers["content-type"] = "application/json"
        try:
            remote = None
            if mooncake:
                first_body["kv_transfer_params"], remote = await mooncake_params(client, mooncake)
            first = await client.post(prefill + path, content=_encode(first_body), headers=headers)
            if first.status_code != 200:
                return _pass_on(first)
            prefilled = first.json()
            num_choices = n * len(prefilled["choices"])
            if (remote or connector_params(prefilled)) and num_choices > 1:
                # They belong to the first prompt, and only one reader can use them.
                return _error(
                    400,
                    f"the request is for {num_choices} choices, and the engines' KV connector "
                    "hands the KV to one: send one request for each",
                )
            second_body = decode_body(body, prefilled, remote)
            content = _encode(second_body)
            sent = client.build_request("POST", decode + path, content=content, headers=headers)
            reply = await client.send(sent, stream=True)
            if body.get("stream") and reply.status_code == 200:
                return StreamingResponse(_stream(reply), media_type="text/event-stream")
            await reply.aread()
            return _pass_on(reply)
        except httpx.HTTPError as e:
            return _error(502, _tell(e))
        except ProxyError as e:
            return _error(502, str(e))
        except (ValueError, TypeError, KeyError, AttributeError) as e:
            return _error(502, f"the prefill engine's answer cannot be read: {e!r}")

    for path in PATHS:
        app.post(path)(answer)

    @app.get("/health")
    async def health() -> Response:
        return Response()

    return app


@contextlib.contextmanager
def running(prefill: str, decode: str, mooncake: str | None = None) -> Iterator[str]:
    """Run the proxy in a thread, on a free loopback port. Yields its URL."""
    config = uvicorn.Config(
        make_app(prefill, decode, mooncake), host="127.0.0.1", port=0, log_level="warning"
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    try:
        while not server.started:
            if not thread.is_alive():
                raise ProxyError("the proxy did not start")
            time.sleep(0.01)
        port = server.servers[0].sockets[0].getsockname()[1]
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join()


def _encode(body: Mapping[str, Any]) -> bytes:
    """Write any value that `json.loads` returned. httpx's own writer refuses NaN and lone
    surrogates. Here the engines decide about them."""
    return json.dumps(body).encode()


async def _stream(reply: httpx.Response) -> AsyncIterator[bytes]:
    """The stream of the decode engine. If it breaks off, an error is its last event, as in vLLM."""
    try:
        async for part in reply.aiter_bytes():
            yield part
    except httpx.HTTPError as e:
        yield f"data: {json.dumps(_error_body(502, _tell(e)))}\n\ndata: [DONE]\n\n".encode()
    finally:
        await reply.aclose()


def _pass_on(reply: httpx.Response) -> Response:
    """Pass on the answer of an engine unchanged."""
    return Response(reply.content, reply.status_code, media_type=reply.headers.get("content-type"))


def _tell(error: httpx.HTTPError) -> str:
    try:
        where = f" {error.request.url}"
    except RuntimeError:  # it has none
        where = ""
    return f"the engine{where} gave no answer: {str(error) or type(error).__name__}"


def _error_body(status: int, told: str) -> dict[str, Any]:
    return {"error": {"message": told, "type": "ProxyError", "param": None, "code": status}}


def _error(status: int, told: str) -> JSONResponse:
    return JSONResponse(_error_body(status, told), status)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the proxy until it is stopped."""
    parser = argparse.ArgumentParser(
        prog="python -m examples.proxy",
        description="Answer with a prefill and a decode engine, and return all rows.",
    )
    parser.add_argument("--prefill", required=True, help="URL of the prefill engine")
    parser.add_argument("--decode", required=True, help="URL of the decode engine")
    parser.add_argument("--mooncake", help="URL of the prefill engine's Mooncake bootstrap server")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (%(default)s)")
    parser.add_argument("--port", type=int, default=8000, help="port to listen on (%(default)s)")
    args = parser.parse_args(argv)
    urls = (url and url.rstrip("/") for url in (args.prefill, args.decode, args.mooncake))
    app = make_app(*urls)
    uvicorn.run(app, host=args.host, port=args.port)


if __name__ == "__main__":
    main()
