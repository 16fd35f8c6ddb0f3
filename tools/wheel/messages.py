# SPDX-License-Identifier: Apache-2.0
"""Messages between an engine and the wheel's compiled front end. ``compiled`` runs this file with
the Python of a wheel; it imports no other tool."""

import contextlib
import dataclasses
import enum
import inspect
import json
import sys
import types
import typing
from typing import Any

import msgspec
import vllm.v1.engine
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

# Rows travel in these: a front end that knows no rows gets none.
ROWS = {"routed_experts"}
SIMPLE = {int: 3, float: 1.5, str: "a", bool: True, bytes: b"b"}


def fields(cls: Any) -> dict[str, bool]:
    """The fields of a message, and whether each must be given."""
    if dataclasses.is_dataclass(cls):
        missing = dataclasses.MISSING
        return {
            f.name: f.default is missing and f.default_factory is missing
            for f in dataclasses.fields(cls)
            if f.init
        }
    return {f.name: f.required for f in msgspec.structs.fields(cls)}


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
    names = fields(cls)
    given = {name: sample(hints[name]) for name, required in names.items() if required}
    for name in names if full else ():
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


if __name__ == "__main__":
    found = read(json.load(sys.stdin)) if sys.argv[1] == "read" else write()
    print(json.dumps(found), flush=True)
