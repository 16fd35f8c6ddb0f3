# SPDX-License-Identifier: Apache-2.0
"""A stand-in for `cohere.types`: a name that is not defined here is a model with any field."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict


class _Any(BaseModel):
    model_config = ConfigDict(extra="allow")


class UserChatMessageV2(_Any):
    role: str
    content: str


# The tests send no other messages.
ChatMessageV2 = UserChatMessageV2


def __getattr__(name: str) -> Any:
    if name.startswith("_"):
        raise AttributeError(name)
    model = globals()[name] = type(name, (_Any,), {"__module__": __name__})
    return model
