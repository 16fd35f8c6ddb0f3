# SPDX-License-Identifier: Apache-2.0
"""How the engines of v0.33.0's property test run, and what may happen to them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from vllm.config import VllmConfig
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
)

from harness import scheduling

BLOCK = 4
MAX_LEN = 48
# Tokens that a layer with a sliding window attends to.
WINDOW_TOKENS = 6
# What the test does not try, or does not compare, and why. Nothing else is left out.
LEFT_OUT = {
    "output of a request that was preempted while a load of it failed": "vLLM issue 49250: the "
    "release delivers the token that was computed from the KV.",
    "reset beside requests that wait with KV": "The release refuses it with an error, after it has "
    "preempted the running requests; they begin again all the same.",
    "sessions that wait for each other's KV": "The release never frees the KV of a session that "
    "waits: where each needs more, all wait for ever.",
    "which computation KV that was loaded is of": "A KV connector may keep an earlier computation "
    "of a block than the rows are of. Their tokens and weights are compared.",
    "which of two computations KV is of": "After a failed load, and with replayed windows, "
    "requests compute KV again in a block of others. These may have rows of either computation.",
    "which computation rows before a sliding window are of": "They have no KV that must fit.",
}


def left_out(case: str, applies: object = True) -> bool:
    assert case in LEFT_OUT
    return bool(applies)


@dataclass(frozen=True)
class Setup:
    """How an engine runs, and what may happen to it."""

    asynchronous: bool = False
    # Steps that may be on their way at a time.
    depth: int = 1
    drafts: int = 0
    num_blocks: int = 14
    chunk: int = 7
    # Prompt tokens of one request in a step, 0 for as many as the step has room for.
    part: int = 0
    connector: bool = False
    # Requests whose KV does not load end with an error; else they compute it.
    policy_fail: bool = False
    caching: bool = True
    # Tokens after a block that its hash covers, as with EAGLE.
    lookahead: int = 0
    # Kind and block size of each KV cache group; full attention decides which rows are known.
    groups: tuple[tuple[str, int], ...] = (("full", BLOCK),)
    # Requests get rows only if they ask for them.
    opt_in: bool = False
    # Tokens of a block hash, where it is not the greatest that fits all groups.
    match_unit: int | None = None
    # Rows have weights too, and every third request gets them.
    wide: bool = False
    # Operations beside requests, steps and aborts.
    also: tuple[str, ...] = ()

    @property
    def row_group(self) -> int:
        """The group whose blocks tell which rows are known."""
        kinds = [kind for kind, _ in self.groups]
        return kinds.index("full") if "full" in kinds else 0

    @property
    def row_block(self) -> int:
        return self.groups[self.row_group][1]


# These hold on the release as well, as `test_release.py` shows.
PLAIN = {
    "synchronous": Setup(),
    "synchronous, resets": Setup(also=("reset",)),
    "asynchronous": Setup(asynchronous=True, depth=2),
    "batch queue": Setup(depth=3),
    "drafts": Setup(drafts=3),
    "asynchronous drafts": Setup(asynchronous=True, depth=2, drafts=3),
    "KV connector": Setup(connector=True, also=("reload",)),
}
# All others do not.
MENDED = {
    # Synchronous and without drafts: the scheduler keeps every token that is computed, so that the
    # latest computation of a block is certain.
    "weights without a reset": Setup(also=("update",)),
    "silent requests": Setup(also=("preempt", "update", "silent")),
    "loads beside silent requests": Setup(connector=True, also=("reload", "silent")),
    "resets with a step in flight": Setup(asynchronous=True, depth=2, also=("reset",)),
    "asynchronous sessions": Setup(asynchronous=True, depth=2, also=("preempt", "session")),
    "remote prefills": Setup(connector=True, also=("receive", "reload", "silent", "fail")),
    "asynchronous remote prefills": Setup(
        asynchronous=True,
        depth=2,
        drafts=2,
        connector=True,
        also=("receive", "session", "silent", "reset"),
    ),
    "without prefix caching": Setup(
        asynchronous=True, depth=2, drafts=2, caching=False, also=("preempt", "session", "silent")
    ),
    "hashes with lookahead": Setup(drafts=3, lookahead=1),
    "asynchronous hashes with lookahead": Setup(
        asynchronous=True, depth=2, drafts=3, lookahead=3, also=("silent",)
    ),
    "opt-in": Setup(asynchronous=True, depth=2, opt_in=True, also=("preempt", "session", "silent")),
    "everything": Setup(
        asynchronous=True, depth=3, drafts=2, also=("preempt", "reset", "session", "silent")
    ),
}
# Blocks are few: those of an aborted request are used again at once.
LOADS = {
    "failed loads": Setup(connector=True, also=("preempt", "reload", "fail")),
    "failed loads beside silent requests": Setup(
        connector=True, also=("preempt", "reload", "fail", "abandon", "silent")
    ),
    "failed loads end requests": Setup(
        connector=True,
        policy_fail=True,
        also=("preempt", "reload", "fail", "abandon", "silent"),
    ),
    "asynchronous failed loads": Setup(
        asynchronous=True,
        depth=2,
        drafts=2,
        connector=True,
        also=("preempt", "reload", "fail", "abandon", "silent"),
    ),
    "asynchronous failed loads end requests": Setup(
        asynchronous=True,
        depth=2,
        connector=True,
        policy_fail=True,
        also=("preempt", "reload", "receive", "fail", "abandon", "silent"),
    ),
    "failed loads of shared blocks": Setup(
        connector=True, part=4, chunk=16, also=("preempt", "reload", "fail", "join", "silent")
    ),
    "asynchronous failed loads of shared blocks": Setup(
        asynchronous=True,
        depth=2,
        connector=True,
        chunk=16,
        also=("preempt", "reload", "fail", "join", "silent"),
    ),
}
# Weights change with requests in flight, or between a load and the computation of what it loads.
WEIGHTS = {
    "weights of running requests": Setup(also=("preempt", "keep", "silent")),
    "asynchronous weights of running requests": Setup(
        asynchronous=True, depth=2, drafts=2, also=("preempt", "keep", "reset", "silent")
    ),
    "loads beside other weights": Setup(connector=True, also=("reload", "update", "silent")),
    "loads beside weights of running requests": Setup(
        connector=True, also=("reload", "keep", "silent")
    ),
}
# Faults of rows end requests at most; faults of steps abort all, and the engine recovers.
FAULTS = {
    "faults": Setup(also=("preempt", "silent", "fault")),
    "asynchronous faults": Setup(
        asynchronous=True,
        depth=2,
        drafts=2,
        also=("preempt", "session", "silent", "reset", "fault"),
    ),
    "faults beside loads": Setup(
        connector=True, also=("reload", "receive", "silent", "fail", "fault")
    ),
    "recovery": Setup(also=("silent", "fault", "crash")),
    "asynchronous recovery": Setup(
        asynchronous=True, depth=3, drafts=2, also=("preempt", "session", "silent", "crash")
    ),
    "recovery beside loads": Setup(
        asynchronous=True,
        depth=2,
        connector=True,
        also=("reload", "receive", "silent", "fail", "crash"),
    ),
}
FULL = ("full", 2 * BLOCK)
WINDOW = ("window", BLOCK)
MAMBA = ("mamba", 2 * BLOCK)
HYBRID = {
    "window after full": Setup(
        groups=(FULL, WINDOW), num_blocks=28, also=("preempt", "update", "silent")
    ),
    "window before full": Setup(groups=(WINDOW, FULL), num_blocks=28, also=("update", "silent")),
    "large window blocks": Setup(
        groups=(("full", BLOCK), ("window", 2 * BLOCK)), num_blocks=28, also=("update", "silent")
    ),
    "asynchronous window": Setup(
        asynchronous=True,
        depth=2,
        drafts=2,
        groups=(WINDOW, FULL),
        num_blocks=28,
        also=("preempt", "reset", "session", "silent"),
    ),
    "window with four steps in flight": Setup(
        asynchronous=True,
        depth=4,
        groups=(FULL, WINDOW),
        num_blocks=28,
        also=("preempt", "reset", "silent", "fault"),
    ),
    "windows alone": Setup(groups=(WINDOW,), also=("preempt", "silent", "fault")),
    "windows alone with three steps in flight": Setup(
        asynchronous=True, depth=3, groups=(WINDOW,), also=("preempt", "reset", "silent")
    ),
    "windows alone with four steps in flight": Setup(
        asynchronous=True,
        depth=4,
        drafts=2,
        groups=(WINDOW, WINDOW),
        num_blocks=28,
        also=("preempt", "session", "silent", "crash"),
    ),
    # Hits may end within a block, whose KV the request then copies.
    "state after full": Setup(
        groups=(FULL, MAMBA),
        match_unit=BLOCK,
        num_blocks=28,
        chunk=12,
        also=("preempt", "update", "silent"),
    ),
    "state before full": Setup(
        groups=(MAMBA, FULL), match_unit=BLOCK, num_blocks=28, chunk=12, also=("update", "silent")
    ),
    "asynchronous state": Setup(
        asynchronous=True,
        depth=2,
        groups=(MAMBA, FULL),
        match_unit=BLOCK,
        num_blocks=28,
        chunk=12,
        also=("preempt", "reset", "session", "silent"),
    ),
    # The last window of a hit is computed again, as in DeepSeek-V4.1.
    "replayed window": Setup(
        groups=(("full", BLOCK), ("replay", BLOCK)), num_blocks=28, also=("preempt", "silent")
    ),
    "asynchronous replayed window": Setup(
        asynchronous=True,
        depth=2,
        drafts=2,
        groups=(("full", 2 * BLOCK), ("replay", BLOCK)),
        num_blocks=28,
        also=("preempt", "reset", "silent"),
    ),
    "window without prefix caching": Setup(
        caching=False, groups=(WINDOW, FULL), num_blocks=28, also=("silent",)
    ),
}
# Rows with weights are longer, and messages may be without them.
WIDE = {
    "wide rows": Setup(wide=True, also=("preempt", "update", "silent")),
    "asynchronous wide rows": Setup(
        asynchronous=True,
        depth=2,
        drafts=2,
        wide=True,
        also=("preempt", "reset", "session", "silent", "fault"),
    ),
    "wide rows beside loads": Setup(
        connector=True, wide=True, also=("receive", "reload", "silent", "fail")
    ),
}
SETUPS = PLAIN | MENDED | LOADS | WEIGHTS | FAULTS | HYBRID | WIDE


@cache
def make_config(setup: Setup) -> tuple[VllmConfig, KVCacheConfig]:
    config = scheduling.make_config(
        num_blocks=setup.num_blocks,
        block_size=setup.row_block,
        max_model_len=MAX_LEN,
        max_num_seqs=6,
        batch=setup.chunk,
        caching=setup.caching,
        asynchronous=setup.asynchronous,
    )
    config.cache_config.prefix_match_unit = setup.match_unit
    config.cache_config.mamba_cache_mode = "align" if setup.caching else "none"
    config.scheduler_config.watermark = 0.0
    config.scheduler_config.long_prefill_token_threshold = setup.part
    if setup.opt_in:
        config.aux_output_config.routed_experts_opt_in = True
    groups = [
        KVCacheGroupSpec([f"{kind} {i}"], make_spec(kind, size))
        for i, (kind, size) in enumerate(setup.groups)
    ]
    return config, KVCacheConfig(setup.num_blocks, [], groups)


def make_spec(kind: str, block_size: int) -> KVCacheSpec:
    if kind == "mamba":
        return MambaSpec(
            block_size=block_size, shapes=((1,),), dtypes=(torch.float32,), mamba_cache_mode="align"
        )
    shape = {"num_kv_heads": 1, "head_size": 1, "dtype": torch.float32}
    if kind == "replay":
        return SlidingWindowMLASpec(
            block_size=block_size, sliding_window=2 * BLOCK, bounded_replay=True, **shape
        )
    if kind == "window":
        return SlidingWindowSpec(block_size=block_size, sliding_window=WINDOW_TOKENS, **shape)
    return FullAttentionSpec(block_size=block_size, **shape)
