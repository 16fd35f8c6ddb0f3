# SPDX-License-Identifier: Apache-2.0
"""`examples/clients/resume.py` around an engine whose answers are written here."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from examples.clients import resume
from examples.clients.resume import ResumingEngine

ROWS = np.arange(12, dtype=np.uint8).reshape(4, 1, 3)


class Engine:
    """Answers with three tokens, and then ends or is aborted."""

    def __init__(self) -> None:
        self.prompts: list[dict[str, Any]] = []
        self.reason = "abort"
        self.sampled = [7, 8, 9]

    async def generate(self, prompt: dict[str, Any], **_: Any) -> AsyncGenerator[Any, None]:
        self.prompts.append(prompt)
        for end in range(1, len(self.sampled) + 1):
            last = end == len(self.sampled)
            yield SimpleNamespace(
                outputs=[
                    SimpleNamespace(
                        token_ids=self.sampled[:end],
                        routed_experts=ROWS if last else None,
                        routed_experts_start=0,
                        finish_reason=self.reason if last else None,
                    )
                ]
            )


def ask(engine: Any, *prompts: list[int], **inputs: Any) -> None:
    async def read(prompt: list[int]) -> None:
        given = {"prompt_token_ids": prompt, **inputs}
        answers = [answer async for answer in engine.generate(prompt=given, request_id="0")]
        assert len(answers) == 3, "every output of the engine comes through"

    for prompt in prompts:
        asyncio.run(read(prompt))


def is_forced(engine: Engine) -> list[bool]:
    return [prompt.get("forced_routed_experts") is ROWS for prompt in engine.prompts]


def test_aborted_request_is_resumed_with_its_rows_once() -> None:
    engine = Engine()
    ask(ResumingEngine(engine), [1, 2], [1, 2, 7, 8, 9], [1, 2, 7, 8, 9])
    assert is_forced(engine) == [False, True, False]


def test_prompt_of_other_tokens_is_unchanged() -> None:
    engine = Engine()
    ask(ResumingEngine(engine), [1, 2], [1, 2, 7, 8], [1, 2])
    assert is_forced(engine) == [False, False, False]
    assert engine.prompts[1] == {"prompt_token_ids": [1, 2, 7, 8]}


def test_request_that_ended_is_not_resumed() -> None:
    engine = Engine()
    engine.reason = "length"
    ask(ResumingEngine(engine), [1, 2], [1, 2, 7, 8, 9])
    assert is_forced(engine) == [False, False]


def test_prompt_with_images_is_left_alone() -> None:
    engine = Engine()
    ask(ResumingEngine(engine), [1, 2], [1, 2, 7, 8, 9], multi_modal_data={"image": "any"})
    assert is_forced(engine) == [False, False]


def test_oldest_rows_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resume, "LIMIT", 1)
    engine = Engine()
    ask(ResumingEngine(engine), [1], [2], [2, 7, 8, 9], [1, 7, 8, 9])
    assert is_forced(engine) == [False, False, True, False]


def test_everything_else_is_the_engine_s() -> None:
    assert ResumingEngine(Engine()).reason == "abort"
