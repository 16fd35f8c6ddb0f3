# SPDX-License-Identifier: Apache-2.0
"""A KV connector for v0.33.0's property test: it loads KV within a step or between steps, and
loses some."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from vllm.v1.request import Request

from tests.v0_33_0.connector.setups import BLOCK


@dataclass
class Connector:
    """Has the KV of every other prompt, at once or some steps later, and the KV of remote
    prefills."""

    # By request: the tokens whose load the last pass began.
    loads: dict[str, range] = field(default_factory=dict)
    found_from: int = 0

    def get_num_new_matched_tokens(self, request: Request, num_computed: int) -> tuple[int, bool]:
        kind = int(request.request_id) % 4
        remote = request.kv_transfer_params or {}
        if kind < 2 and not remote.get("do_remote_prefill"):
            return 0, False
        self.found_from = num_computed
        if kind < 2:
            # Models with a state receive all but the last token.
            found = request.num_prompt_tokens - kind - num_computed
            return max(found, 0), found > 0
        # Only a load between steps may bring the whole prompt.
        found = (request.num_prompt_tokens - (kind == 2)) // BLOCK * BLOCK - num_computed
        return max(found, 0), kind == 3 and found > 0

    def update_state_after_alloc(self, request: Request, blocks: Any, num_external: int) -> None:
        if num_external:
            self.loads[request.request_id] = range(self.found_from, self.found_from + num_external)
            if int(request.request_id) % 4 < 2:
                # Others can be loaded again.
                request.kv_transfer_params = {"do_remote_prefill": False}

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, None]:
        return False, None

    def take_events(self) -> tuple[()]:
        return ()

    def get_loaded_kv_cache_group_ids(self, request: Request) -> tuple[int, ...]:
        return (0,)

    def __getattr__(self, name: str) -> Any:
        """Nothing to do or to say for the rest."""
        return lambda *args, **kwargs: None


@dataclass
class Load:
    """KV on its way to blocks of a request."""

    tokens: list[int]
    blocks: list[int]
    positions: range
    # Steps that it still takes, 0 if it is within a step.
    steps: int = 0

    def lost(self, index: int) -> list[int]:
        """One of the blocks that it fills; with a large index, all blocks after it too."""
        first, last = self.positions.start // BLOCK, (self.positions.stop - 1) // BLOCK
        lost = self.blocks[first + index % (last - first + 1) : last + 1]
        return lost if index > last - first else lost[:1]
