# SPDX-License-Identifier: Apache-2.0
"""What is right: rows of the passes whose KV a request used, tokens of the model, KV in the prefix
cache that somebody computed, and nothing that stays."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from vllm.v1.core.kv_cache_utils import get_block_hash
from vllm.v1.core.routed_experts_rows import NEVER, RoutedExpertsRows
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request, RequestStatus
from vllm.v1.routed_experts_params import get_routed_experts_start

from tests.sequence import VOCABULARY, prefix_digests
from tests.v0_20_2.kv import UNSEEN, KVCache, read_rows


def asks(request: Request) -> bool:
    return get_routed_experts_start(request.sampling_params) is not None


def check_rows(
    rows: np.ndarray, start: int, tokens: Sequence[int], passes: np.ndarray, kv: KVCache
) -> None:
    """Each row is from a pass over the request's own tokens. If the request computed the position,
    the row is from its own last pass. If it read the KV of the position, the row is from the pass
    that made this KV. No such pass read wrong KV, or is from before a reset."""
    of_rows, stop = read_rows(rows), start + len(rows)
    seen = passes[start:stop]
    np.testing.assert_array_equal(of_rows[seen != UNSEEN], seen[seen != UNSEEN])
    for number, digest in zip(of_rows.tolist(), prefix_digests(tokens)[start:stop], strict=True):
        assert kv.digests[number] == digest
        assert kv.is_good[number]
        assert number >= kv.first_valid


def check_request(request: Request, rows: np.ndarray, start: int | None, may_fail: bool) -> None:
    """The request has the tokens that the model samples, and the rows that it asked for."""
    check_tokens(request)
    asked = get_routed_experts_start(request.sampling_params)
    if asked is None:
        assert len(rows) == 0
        return
    start = asked if start is None else start
    assert start == asked or (
        asked < start < request.num_prompt_tokens
        and request.kv_transfer_params["do_remote_prefill"]
    )
    if request.status != RequestStatus.FINISHED_ABORTED and not may_fail:
        assert len(rows) == request.num_tokens - 1 - start


def check_tokens(request: Request) -> None:
    """No token of the request was sampled after other tokens, or from wrong KV. Inputs of sessions
    have other tokens than the model samples."""
    tokens = list(request.all_token_ids)
    digests = prefix_digests(tokens)
    first = 0 if request.resumable else len(tokens) - request.num_output_tokens
    for position in range(first, len(tokens)):
        if tokens[position] < VOCABULARY or position >= request.num_prompt_tokens:
            assert tokens[position] == digests[position - 1] % VOCABULARY


def check_cached_blocks(requests: Iterable[Request], scheduler: Scheduler, kv: KVCache) -> None:
    """Each block of the prefix cache has the KV of its tokens, and their rows if it has any."""
    manager, pool = scheduler.routed_experts, scheduler.kv_cache_manager.block_pool
    size = kv.block_size
    per_block = size // pool.hash_block_size
    digests = {}
    for request in requests:
        of_request = prefix_digests(request.all_token_ids)
        hashes = request.block_hashes
        for index in range(len(hashes) // per_block):
            block_hash = b"".join(hashes[index * per_block : (index + 1) * per_block])
            digests[block_hash] = of_request[index * size : (index + 1) * size]
    for block in pool.blocks:
        if block.block_hash is None:
            continue
        places = kv.places([block.block_id], 0, size)
        assert kv.is_of(places, digests[get_block_hash(block.block_hash)])
        if has_rows(manager.rows, block.block_id):
            of_rows = read_rows(manager.rows._rows[places])
            np.testing.assert_array_equal(of_rows, kv.passes[places])


def has_rows(rows: RoutedExpertsRows, block_id: int) -> bool:
    """Whether requests that ask may use the block. No step is on its way."""
    return bool(rows.cached_step[block_id] != NEVER)


def check_nothing_left(scheduler: Scheduler) -> None:
    """All requests are gone."""
    manager, pool = scheduler.routed_experts, scheduler.kv_cache_manager.block_pool
    assert not scheduler.requests
    assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1
    assert not scheduler.finished_recving_kv_req_ids
    assert not scheduler.failed_recving_kv_req_ids
    assert not manager.requests
    assert not manager.num_received
    assert not manager.num_cached
    assert not manager.prefixes
    assert not manager.steps_in_flight
    assert not manager.failed_req_ids
