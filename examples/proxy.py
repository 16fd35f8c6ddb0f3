# SPDX-License-Identifier: Apache-2.0
"""A proxy for a prefill and a decode engine (P/D disaggregation) that returns all rows.

    python -m examples.proxy --prefill URL --decode URL [--mooncake URL] [--port PORT]

The proxy asks the prefill engine for one token; this answer has the rows of the prompt. Then it
asks the decode engine, which receives the KV of the prompt, for the whole answer. Its rows begin
after the received tokens, at `routed_experts_start`. The proxy puts the prompt's rows in front. It
supports /inference/v1/generate, /v1/completions and /v1/chat/completions, streamed or not, with or
without rows.

Start both engines with `--enable-return-routed-experts`. Connectors like NIXL's return
`kv_transfer_params`, which the proxy passes to the decode engine. They are valid for one prompt and
one choice, so requests for more get status 400. Connectors that find KV by its tokens return none;
then the proxy sends `{"do_remote_prefill": true}`. With Mooncake's connector name the prefill
engine's bootstrap server with `--mooncake`; the proxy then sends what vLLM's example proxy sends.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import io
import json
import threading
import time
import uuid
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx
import numpy as np
import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse

from examples.client import Rows, decode_rows

GENERATE = "/inference/v1/generate"
PATHS = (GENERATE, "/v1/completions", "/v1/chat/completions")
# Request headers that the proxy passes to both engines.
HEADERS = ("authorization", "x-request-id")


class ProxyError(Exception):
    """The answers of the engines cannot be joined; the text says why, in one sentence."""


@dataclass(frozen=True)
class PromptRows:
    """The rows that the prefill engine returned for one prompt of P tokens.

    Attributes:
        rows: (P - start, L, K) uint8 or uint16.
        start: position of the first row.
        moe_layers: the decoder layers that route.
    """

    rows: Rows
    start: int
    moe_layers: list[int]

    @classmethod
    def read(cls, choice: Mapping[str, Any]) -> PromptRows | None:
        """Read the rows of a choice of the prefill engine; None if it has none.

        Raises:
            ProxyError: rows that cannot be read.
        """
        if choice.get("routed_experts") is None:
            return None
        try:
            rows = decode_rows(choice["routed_experts"])
            return cls(rows, int(choice["routed_experts_start"]), choice["moe_layers"])
        except (KeyError, TypeError, ValueError) as e:
            raise ProxyError(f"rows of the prefill engine cannot be read: {e}") from e

    def put_before(self, choice: Mapping[str, Any]) -> dict[str, Any]:
        """Put these rows before those of the decode engine.

        Args:
            choice: of the decode engine's answer, or of the chunk of its stream that has the first
                rows of the choice.

        Returns:
            The choice with contiguous rows from `start` on.

        Raises:
            ProxyError: rows that cannot be read or joined, or that leave a gap.
        """
        behind = PromptRows.read(choice)
        if behind is None:
            raise ProxyError("the decode engine returned no rows, the prefill engine did")
        ours, theirs = ((*p.rows.shape[1:], p.rows.dtype, p.moe_layers) for p in (self, behind))
        if ours != theirs:
            raise ProxyError(
                f"the engines' rows do not join: {self.rows.dtype} of {self.rows.shape[1:]} and "
                f"{behind.rows.dtype} of {behind.rows.shape[1:]}, moe_layers {self.moe_layers} "
                f"and {behind.moe_layers}"
            )
        end = self.start + len(self.rows)
        if behind.start > end:
            raise ProxyError(
                f"rows leave a gap: the prefill engine's end before position {end}, the decode "
                f"engine's begin at {behind.start}"
            )
        before = self.rows[: max(0, behind.start - self.start)]
        return {
            **choice,
            "routed_experts": _encode(np.concatenate([before, behind.rows])),
            "routed_experts_start": min(self.start, behind.start),
        }


class Joiner:
    """Joins the choices of one answer; the n choices of a prompt share its rows."""

    def __init__(self, prefilled: Mapping[str, Any], n: int) -> None:
        """Read the prefill engine's answer, which has one choice for each prompt.

        Raises:
            ProxyError: it cannot be read.
        """
        try:
            choices = sorted(prefilled["choices"], key=lambda choice: int(choice["index"]))
        except (KeyError, TypeError, ValueError) as e:
            raise ProxyError(f"the prefill engine's answer cannot be read: {e}") from e
        self._prompts = [PromptRows.read(choice) for choice in choices]
        self._n = n
        self.num_choices = n * len(choices)
        self._joined: set[int] = set()
        self._seen: set[int] = set()

    def join(self, choice: Mapping[str, Any]) -> Mapping[str, Any]:
        """Returns a choice of the decode engine's answer, or of a chunk, with the prompt's rows.

        Raises:
            ProxyError: as `PromptRows.put_before`, and for rows of the decode engine alone.
        """
        index = int(choice["index"])
        self._seen.add(index)
        if choice.get("routed_experts") is None or index in self._joined:
            return choice
        prompt = self._prompts[index // self._n]
        if prompt is None:
            raise ProxyError("the prefill engine returned no rows, the decode engine did")
        self._joined.add(index)
        return prompt.put_before(choice)

    def end(self) -> None:
        """Check that no choice lacks the rows of its prompt.

        Raises:
            ProxyError: a choice has none.
        """
        if any(self._prompts) and self._seen - self._joined:
            raise ProxyError("the decode engine returned no rows, the prefill engine did")


def prefill_body(path: str, body: Mapping[str, Any]) -> dict[str, Any]:
    """The request for the prefill engine: the same prompts, one token each, not streamed."""
    # min_tokens too: a request that ends with a stop token sends no KV.
    short = {"max_tokens": 1, "min_tokens": 1, "n": 1}
    made = {**body, "stream": False, "kv_transfer_params": {"do_remote_decode": True}}
    made.pop("stream_options", None)
    if path == GENERATE:
        return {**made, "sampling_params": {**body["sampling_params"], **short}}
    made.pop("max_completion_tokens", None)  # chat's other name for max_tokens
    return {**made, **short}


def decode_body(body: Mapping[str, Any], prefilled: Mapping[str, Any]) -> dict[str, Any]:
    """The request for the decode engine: the original one, and receive the prompt's KV."""
    params = prefilled.get("kv_transfer_params") or {"do_remote_prefill": True}
    return {**body, "kv_transfer_params": params}


async def mooncake_params(
    client: httpx.AsyncClient, bootstrap: str
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The `kv_transfer_params` for the prefill and for the decode engine of one request.

    Args:
        bootstrap: URL of the prefill engine's bootstrap server.

    Raises:
        ProxyError: the server does not name one engine.
        httpx.HTTPError: it gives no answer.
    """
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
        {"do_remote_decode": True, "do_remote_prefill": False, **transfer},
        {
            "do_remote_decode": False,
            "do_remote_prefill": True,
            "remote_bootstrap_addr": bootstrap,
            "remote_engine_id": engine_id,
            **transfer,
        },
    )


def make_app(prefill: str, decode: str, mooncake: str | None = None) -> FastAPI:
    """Make the proxy.

    Args:
        prefill, decode: URLs of the two engines, without a path.
        mooncake: URL of the prefill engine's bootstrap server, if its connector is Mooncake's.
    """

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
        except (ValueError, TypeError, AttributeError, KeyError) as e:
            return _error(400, f"the request is no JSON object of this endpoint: {e!r}")
        headers = {name: request.headers[name] for name in HEADERS if name in request.headers}
        try:
            remote = None
            if mooncake:
                first_body["kv_transfer_params"], remote = await mooncake_params(client, mooncake)
            first = await client.post(prefill + path, json=first_body, headers=headers)
            if first.status_code != 200:
                return _pass_on(first)
            prefilled = first.json()
            joiner = Joiner(prefilled, n)
            if remote:
                prefilled["kv_transfer_params"] = remote
            if prefilled.get("kv_transfer_params") and joiner.num_choices > 1:
                # They belong to the first prompt, and only one reader can use them.
                return _error(
                    400,
                    f"the request is for {joiner.num_choices} choices, and the engines' KV "
                    "connector hands the KV to one: send one request for each",
                )
            sent = client.build_request(
                "POST", decode + path, json=decode_body(body, prefilled), headers=headers
            )
            reply = await client.send(sent, stream=True)
            if body.get("stream") and reply.status_code == 200:
                return StreamingResponse(_stream(reply, joiner), media_type="text/event-stream")
            await reply.aread()
            if reply.status_code != 200:
                return _pass_on(reply)
            joined = _join(reply.json(), joiner)
            joiner.end()
            return JSONResponse(joined)
        except httpx.HTTPError as e:
            return _error(502, _tell(e))
        except ProxyError as e:
            return _error(502, str(e))
        except ValueError as e:
            return _error(502, f"an engine's answer is no JSON: {e}")

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


async def _stream(reply: httpx.Response, joiner: Joiner) -> AsyncIterator[str]:
    """The events of the decode engine with joined rows. Errors are events, as in vLLM."""
    try:
        async for line in reply.aiter_lines():
            data = line.removeprefix("data: ")
            if data == line:
                pass
            elif data == "[DONE]":
                joiner.end()
            else:
                line = "data: " + json.dumps(_join(json.loads(data), joiner))
            yield line + "\n"
    except (httpx.HTTPError, ProxyError, ValueError) as e:
        told = _tell(e) if isinstance(e, httpx.HTTPError) else str(e)
        yield f"data: {json.dumps(_error_body(502, told))}\n\ndata: [DONE]\n\n"
    finally:
        await reply.aclose()


def _join(decoded: Mapping[str, Any], joiner: Joiner) -> dict[str, Any]:
    """Join the choices of a whole answer or of a chunk."""
    try:
        return {**decoded, "choices": [joiner.join(choice) for choice in decoded["choices"]]}
    except (KeyError, TypeError, IndexError) as e:
        if "error" in decoded:
            return dict(decoded)
        raise ProxyError(f"the decode engine's answer cannot be read: {e!r}") from e


def _pass_on(reply: httpx.Response) -> Response:
    """Pass on the error of an engine unchanged."""
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


def _encode(rows: Rows) -> str:
    file = io.BytesIO()
    np.save(file, rows, allow_pickle=False)
    return base64.b64encode(file.getbuffer()).decode()


def main(argv: Sequence[str] | None = None) -> None:
    """Run the proxy until it is stopped."""
    parser = argparse.ArgumentParser(
        prog="python -m examples.proxy",
        description="Join the rows of a prefill and a decode engine into one answer.",
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
