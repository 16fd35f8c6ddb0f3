# SPDX-License-Identifier: Apache-2.0
"""Messages between an engine and the wheel's compiled front end. ``compiled.py`` runs this file
with the Python of a wheel; it imports no other tool."""

import contextlib
import dataclasses
import enum
import inspect
import json
import socket
import subprocess
import sys
import threading
import types
import typing
import urllib.request
from typing import Any

import msgspec
import vllm.v1.engine
import zmq
from vllm.v1.engine import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreReadyResponse,
    EngineCoreRequest,
    EngineCoreRequestType,
    FinishReason,
    UtilityOutput,
)
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

# Rows travel in these: a front end that knows no rows gets none.
ROWS = {"routed_experts"}
SIMPLE = {int: 3, float: 1.5, str: "a", bool: True, bytes: b"b"}


def is_message(cls: Any) -> bool:
    return inspect.isclass(cls) and (
        dataclasses.is_dataclass(cls) or issubclass(cls, msgspec.Struct)
    )


def sample(kind: Any) -> Any:
    """A value of a type that is not the default; None if there is none here."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if kind in SIMPLE:
        return SIMPLE[kind]
    if origin in (typing.Union, types.UnionType):
        return next((v for v in map(sample, args) if v is not None), None)
    if origin is typing.Literal:
        return args[0]
    if origin in (list, set, tuple) and args:
        inner = sample(args[0])
        return None if inner is None else origin([inner])
    if origin is dict:
        key, value = map(sample, args)
        return None if key is None or value is None else {key: value}
    if inspect.isclass(kind) and issubclass(kind, enum.Enum):
        return next(iter(kind))
    return make(kind, full=True) if is_message(kind) else None


def make(cls: Any, full: bool) -> Any:
    """A message with the fields that it must have, or with all that have a sample."""
    hints = typing.get_type_hints(cls)
    fields = inspect.signature(cls).parameters
    given = {n: sample(hints[n]) for n, field in fields.items() if field.default is field.empty}
    for name in fields if full else ():
        value = None if name in ROWS or name in given else sample(hints[name])
        if value is not None:
            with contextlib.suppress(Exception):  # a value that does not go with the others
                trial = MsgpackEncoder().encode(cls(**given, **{name: value}))
                MsgpackDecoder(cls).decode(trial)
                given[name] = value
    with contextlib.suppress(ValueError):  # some fields must not all be left out
        return cls(**given)
    return None


def classes() -> dict[str, Any]:
    return {
        name: cls
        for name, cls in vars(vllm.v1.engine).items()
        if is_message(cls) and cls.__module__ == vllm.v1.engine.__name__
    }


def write() -> dict[str, list[str]]:
    """Every message of an engine, encoded, twice: with few fields and with many."""
    return {
        f"{name} {'full' if full else 'plain'}": encode(make(cls, full))
        for name, cls in classes().items()
        for full in (False, True)
    }


def read(messages: dict[str, list[str]]) -> dict[str, list[str]]:
    """The same messages, decoded and encoded again."""
    found = {}
    for name, frames in messages.items():
        try:
            decoder = MsgpackDecoder(classes()[name.split()[0]])
            found[name] = encode(decoder.decode([bytes.fromhex(frame) for frame in frames]))
        except Exception as error:
            found[name] = [f"{type(error).__name__}: {error}"]
    return found


def encode(message: Any) -> list[str]:
    return [bytes(frame).hex() for frame in MsgpackEncoder().encode(message)]


def listen() -> socket.socket:
    place = socket.socket()
    place.bind(("127.0.0.1", 0))
    place.listen(16)
    place.set_inheritable(True)
    return place


def answer_requests(inputs: int, outputs: int, requests: list[Any]) -> None:
    """An engine that gives each request four tokens. ``requests`` gets what it was sent."""
    context = zmq.Context()
    get, put = context.socket(zmq.DEALER), context.socket(zmq.PUSH)
    get.setsockopt(zmq.IDENTITY, (0).to_bytes(2, "little"))
    get.connect(f"tcp://127.0.0.1:{inputs}")
    put.connect(f"tcp://127.0.0.1:{outputs}")
    values = {"max_model_len": 512, "num_gpu_blocks": 100, "block_size": 32, "dtype": "float32"}
    ready = make(EngineCoreReadyResponse, full=False)
    ready = dataclasses.replace(ready, **values, data_parallel_rank=0, dp_stats_address=None)
    get.send(msgspec.msgpack.encode(ready))
    encoder, decoder = MsgpackEncoder(), MsgpackDecoder(EngineCoreRequest)
    while True:
        kind, *frames = get.recv_multipart()
        if kind == EngineCoreRequestType.ADD.value:
            request = decoder.decode(frames)
            requests.append([request.prompt_token_ids, encode(request.sampling_params)])
            for token in range(20, 24):
                reason = FinishReason.LENGTH if token == 23 else None
                output = EngineCoreOutput(request.request_id, [token], finish_reason=reason)
                put.send_multipart(encoder.encode(EngineCoreOutputs(outputs=[output])))
        elif kind == EngineCoreRequestType.UTILITY.value:
            call = msgspec.msgpack.decode(frames[0])[1]
            reply = EngineCoreOutputs(utility_output=UtilityOutput(call_id=call))
            put.send_multipart(encoder.encode(reply))


def serve(program: str, checkpoint: str) -> dict[str, Any]:
    """What the compiled front end answers when this Python is its engine."""
    places = [listen() for _ in range(3)]  # for HTTP, the engine's inputs and its outputs
    port, *engine = (place.getsockname()[1] for place in places)
    arguments = {"model_tag": checkpoint, "host": "127.0.0.1", "port": port}
    command = [program, "frontend", "--args-json", json.dumps(arguments)]
    for option, place in zip(("listen", "input-listener", "output-listener"), places, strict=True):
        command += [f"--{option}-fd", str(place.fileno())]
    kept = [place.fileno() for place in places]
    requests: list[Any] = []
    with subprocess.Popen(command, pass_fds=kept, stdout=sys.stderr) as process:
        try:
            for place in places:
                place.close()
            thread = threading.Thread(target=answer_requests, args=(*engine, requests), daemon=True)
            thread.start()
            body = {"model": checkpoint, "prompt": [1, 2, 3], "max_tokens": 4, "seed": 5}
            url, headers = f"http://127.0.0.1:{port}", {"content-type": "application/json"}
            data = json.dumps(body).encode()
            request = urllib.request.Request(f"{url}/v1/completions", data, headers)
            # The port listens already: the answer comes when the front end is ready.
            with urllib.request.urlopen(request, timeout=120) as answer:
                return {"text": json.load(answer)["choices"][0]["text"], "requests": requests}
        finally:
            process.kill()


if __name__ == "__main__":
    what, *arguments = sys.argv[1:]
    if what == "serve":
        print(json.dumps(serve(*arguments)), flush=True)
    else:
        print(json.dumps(read(json.load(sys.stdin)) if what == "read" else write()))
