# SPDX-License-Identifier: Apache-2.0
"""The timed loads, and which requests ask in each mode."""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import numpy as np

# Who asks in engines that let requests ask: no request, every one for rows, or every one for rows
# and weights. For other engines, the mode is the flag.
MODES = ("silent", "all", "both")


@dataclass(frozen=True)
class Load:
    """One load: `turns` batches, each of which starts when the one before has ended. A later turn
    of a conversation repeats the earlier ones and their answers."""

    requests: int  # of a batch
    prompt: int  # tokens that each turn adds to a conversation
    output: int
    turns: int = 1
    shared: int = 0  # tokens that all conversations begin with
    decodes: bool = False  # most steps only decode: the time of a step is reported too
    share: float = 0.13  # of the measuring time

    def first_prompts(self, key: str, vocab: int) -> list[list[int]]:
        """Prompts of the first turn; the same for the same key."""
        rng = np.random.default_rng(zlib.crc32(key.encode()))
        shared = rng.integers(10, vocab - 10, self.shared).tolist()
        return [
            shared + rng.integers(10, vocab - 10, self.prompt).tolist()
            for _ in range(self.requests)
        ]

    def later_tokens(self, key: str, vocab: int) -> list[list[int]]:
        """What the later turn of this key adds to each conversation."""
        rng = np.random.default_rng(zlib.crc32(key.encode()))
        return rng.integers(10, vocab - 10, (self.requests, self.prompt)).tolist()

    def asks(self, mode: str) -> list[bool | None]:
        """For each request whether it asks; None in modes that are the flag of the engine."""
        return [mode != "silent" if mode in MODES else None] * self.requests

    @property
    def text(self) -> str:
        """In words."""
        text = f"{self.requests} × ({self.prompt:,} in, {self.output} out)"
        if self.turns > 1:
            text += f", {self.turns} turns"
        if self.shared:
            text += f", first {self.shared:,} tokens shared"
        return text


LOADS: dict[str, Load] = {
    "decode": Load(128, 128, 128, decodes=True, share=0.6),
    "prefill": Load(16, 2048, 4),
    "long": Load(1, 8192, 1, share=0.05),
    "single": Load(1, 64, 192, decodes=True),
    "turns": Load(16, 256, 32, turns=3, shared=512, share=0.14),
    "group": Load(64, 16, 48, shared=8176, share=0.05),
    "many": Load(512, 64, 48, decodes=True, share=0.05),
}
# For a CPU.
TINY_LOADS: dict[str, Load] = {
    "decode": Load(16, 16, 24, decodes=True, share=0.6),
    "prefill": Load(4, 200, 2),
    "long": Load(1, 400, 1, share=0.05),
    "single": Load(1, 16, 24, decodes=True),
    "turns": Load(4, 40, 6, turns=3, shared=64, share=0.14),
    "group": Load(8, 8, 4, shared=192, share=0.05),
    "many": Load(32, 16, 4, decodes=True, share=0.05),
}


def loads_of(model: str) -> dict[str, Load]:
    """The loads for a model of `harness.shapes`."""
    return TINY_LOADS if model == "tiny" else LOADS
