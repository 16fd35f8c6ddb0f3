# SPDX-License-Identifier: Apache-2.0
"""Mutants of the line v0.33.0, whose property tests are `tests/v0_33_0/test_connector.py` and
`tests/v0_33_0/test_forced_scheduling.py`. `tests/v0_33_0/test_expert_weights.py` has tests of
experts' weights that need no engine."""

from __future__ import annotations

from checks.mutants import Mutant

CONFIG = "config/aux_output.py"
CONNECTOR = "distributed/aux_output_connector/connector.py"
WORKER = "distributed/aux_output_connector/worker.py"
KNOWN = "distributed/aux_output_connector/known_blocks.py"
OUTPUTS = "distributed/aux_output_connector/outputs.py"
ROWS = "distributed/aux_output_connector/request_rows.py"
FORCED = "v1/forced_routed_experts.py"
FORCED_WORKER = "v1/worker/gpu/forced_routed_experts.py"
WEIGHTS = "model_executor/layers/fused_moe/router/forced_experts.py"
RECORD = "v1/routed_experts_record.py"
BASE_ROUTER = "model_executor/layers/fused_moe/router/base_router.py"
CPU_ROUTER = "model_executor/layers/fused_moe/router/cpu_router.py"
OUTPUT_PROCESSOR = "v1/engine/output_processor.py"
BLOCK_POOL = "v1/core/block_pool.py"
BLOCKS = "v1/core/kv_cache_utils.py"
KV_CACHE = "v1/core/kv_cache_manager.py"
SCHEDULER = "v1/core/sched/scheduler.py"
ENGINE_CORE = "v1/engine/core.py"
SENTINEL = "v1/fault_tolerance/engine_core_sentinel.py"

MUTANTS = [
    # Stale rows.
    Mutant(
        "earlier block with the same tokens still found",
        BLOCK_POOL,
        "                self._uncache_blocks(block_hash_with_group_id)\n",
        "",
        setups="weights or window or state",
    ),
    Mutant(
        "rows of a block of outputs shared beyond its KV block",
        CONNECTOR,
        "    return block_size\n\n\n@dataclass\n",
        "    return 4\n\n\n@dataclass\n",
        setups="window or state",
    ),
    Mutant(
        "outputs known by another group than full attention",
        KNOWN,
        "            return group_id\n",
        "            return 0\n",
        setups="window or state",
    ),
    Mutant(
        "hits end within a block of outputs",
        KV_CACHE,
        "                whole_blocks=request.captures_aux_output,\n            )\n",
        "            )\n",
        setups="state",
    ),
    Mutant(
        "all computations of a block have the same rows",
        KNOWN,
        "    if not number:\n        return block_hash\n",
        "    return block_hash\n",
        setups="window or state or silent",
    ),
    Mutant(
        "request does not know which computation it found",
        CONNECTOR,
        "        self._note_found(request, 0, num_computed_tokens // block_size)\n",
        "",
        setups="synchronous or drafts",
    ),
    Mutant(
        "rows that a loading request found are not kept",
        CONNECTOR,
        "            self._retained_hashes += keys\n",
        "",
        setups="loads or remote",
    ),
    Mutant(
        "cached block keeps its number when it is computed again",
        CONNECTOR,
        "block.aux_output_number = max(number, block.aux_output_number)\n",
        "pass\n",
        setups="replayed or failed",
    ),
    Mutant(
        "first computation is kept, not the latest",
        CONNECTOR,
        "                if known is None or number > known:\n",
        "                if known is None:\n",
        setups="synchronous or drafts or windows",
    ),
    # Cached blocks without rows.
    Mutant(
        "blocks of silent requests count as captured",
        BLOCK_POOL,
        "                and request.captures_aux_output\n",
        "",
        setups="silent or window or state",
    ),
    Mutant(
        "cap removed",
        KNOWN,
        "                return (first + sum(1 for _ in known)) * self._block_size\n",
        "                return None\n",
        setups="silent or window or state",
    ),
    Mutant(
        "block in which the wanted rows begin not checked",
        KNOWN,
        "        first = start // self._block_size\n",
        "        first = -(-start // self._block_size)\n",
        setups="silent or window or state",
    ),
    # Eviction.
    Mutant(
        "evicted block keeps its mark",
        BLOCKS,
        "        self._block_hash_num_tokens = None\n        self.has_aux_output = False\n",
        "        self._block_hash_num_tokens = None\n",
        setups="silent or window or state",
    ),
    Mutant(
        "rows kept for blocks that were never captured",
        CONNECTOR,
        "            if block.has_aux_output or (\n                # It was freed",
        "            if True or (\n                # It was freed",
        setups="remote",
    ),
    Mutant(
        "kept rows never released",
        KNOWN,
        "            self._released_hashes.append(aux_output_key(block_hash, number))\n",
        "",
        setups="window or state or silent or weights",
    ),
    Mutant(
        "kept rows survive a reset",
        CONNECTOR,
        "        self._released_hashes.extend(starmap(aux_output_key, self._kv_cached.items()))\n",
        "",
        setups="reset",
    ),
    # Resets.
    Mutant(
        "rows from before a reset count",
        CONNECTOR,
        "        self._generation += 1\n",
        "",
        setups="reset",
    ),
    # Rewinds.
    Mutant(
        "rewound request not told",
        CONNECTOR,
        "        self._rewound.update(self._sent_hash_counts.keys() & rewound)\n",
        "",
        setups="session or failed",
    ),
    Mutant(
        "rewound request keeps the position of its first token",
        CONNECTOR,
        "            rewound_requests[request_id] = request.num_computed_tokens\n",
        "            rewound_requests[request_id] = 0\n",
        setups="session or failed",
    ),
    # Truncation at accepted tokens.
    Mutant(
        "row of the last sampled token expected",
        CONNECTOR,
        "        token_end = request.num_tokens - 1\n",
        "        token_end = request.num_tokens\n",
    ),
    Mutant(
        "rows of rejected drafts count",
        WORKER,
        "        counts = num_tokens - num_rejected\n",
        "        counts = num_tokens\n",
        setups="drafts",
    ),
    Mutant(
        "blocks that no step computed still found",
        SCHEDULER,
        "                            self.kv_cache_manager.uncache_uncomputed(preempted_req)\n",
        "",
        setups="own_pass",
    ),
    # Loads beside computations.
    Mutant(
        "loaded block used though another request computed it meanwhile",
        SCHEDULER,
        "            if max_loaded < request.num_computed_tokens:\n",
        "            if max_loaded < 0:\n",
        setups="meanwhile",
    ),
    # Sharing.
    Mutant(
        "last hashes of an ended request lost",
        CONNECTOR,
        "            self._finished_requests[request_id] = self._take_new_hashes(\n"
        "                request, request.num_computed_tokens\n"
        "            )\n",
        "            pass\n",
    ),
    Mutant(
        "ended request forgotten while its step runs",
        WORKER,
        "            if self._pending_outputs:\n"
        "                # A step in flight may need them.\n",
        "            if False:\n",
    ),
    # Losses.
    Mutant(
        "no new generation after a loss",
        CONNECTOR,
        "        self.reset()\n        return lost - self._taken.keys()\n",
        "        return lost - self._taken.keys()\n",
        setups="fault or recovery",
    ),
    # Rows of earlier steps.
    Mutant(
        "rows of earlier steps of another request",
        OUTPUTS,
        "                earlier_ranges[len(indices)] = self.earlier_ranges[place]\n",
        "                earlier_ranges[index] = self.earlier_ranges[place]\n",
    ),
    Mutant(
        "earlier rows begin at their block",
        ROWS,
        "            offset = position % block_size\n",
        "            offset = 0\n",
        setups="session or drafts",
    ),
    # Loads, faults and remote prefills.
    Mutant(
        "external KV taken without its rows",
        KNOWN,
        "            and all(map(self._has_rows, self._block_hashes(request)[first:end]))\n",
        "",
        setups="loads",
    ),
    Mutant(
        "cached blocks of a remote prefill count as captured",
        KNOWN,
        "        if is_remote_prefill:\n            first = 0\n",
        "",
        setups="remote",
    ),
    Mutant(
        "rows of received tokens expected",
        KNOWN,
        "            request.aux_output_start = num_hit\n",
        "",
        setups="remote",
    ),
    Mutant(
        "received blocks count as captured",
        BLOCK_POOL,
        "                and num_hash_tokens - block_size >= request.aux_output_start\n",
        "",
        setups="remote",
    ),
    Mutant(
        "start stays after tokens that failed to load",
        KV_CACHE,
        "        request.aux_output_start = min(request.aux_output_start, total_computed_tokens)\n",
        "",
        setups="remote",
    ),
    Mutant(
        "rows kept that are older than the KV that a KV connector may have",
        CONNECTOR,
        "            self._release_earlier(request)\n",
        "            pass\n",
        setups="loads and weights or loads and other",
    ),
    Mutant(
        "rows released while their KV is loaded",
        KNOWN,
        "                and block_hash not in loading\n            ):\n",
        "            ):\n",
        setups="loads",
    ),
    Mutant(
        "block on the GPU counts as captured though its rows were released",
        KNOWN,
        "        if block := self._gpu_cached(block_hash):\n"
        "            block.has_aux_output = False\n"
        "        if block_hash",
        "        if block_hash",
        setups="loads",
    ),
    # KV that is not there.
    Mutant(
        "loaded blocks stay cached when their request ends",
        SCHEDULER,
        "        assert request.is_finished()\n\n        self._uncache_uncertain_blocks(request)\n",
        "        assert request.is_finished()\n\n",
        setups="failed",
    ),
    Mutant(
        "loaded blocks stay cached when their request is preempted",
        SCHEDULER,
        '            "Only running requests can be preempted"\n        )\n'
        "        self._uncache_uncertain_blocks(request)\n",
        '            "Only running requests can be preempted"\n        )\n',
        setups="failed",
    ),
    Mutant(
        "blocks of a load in flight count as certain",
        SCHEDULER,
        "            certain = load_start\n",
        "            pass\n",
        setups="failed",
    ),
    Mutant(
        "blocks that failed to load stay cached until they are computed again",
        SCHEDULER,
        "        if sync_blocks_to_evict:\n",
        "        if sync_blocks_to_evict and not self.recompute_kv_load_failures:\n",
        setups="failed",
    ),
    Mutant(
        "output of a request that began in a step in flight kept when a shared block fails",
        SCHEDULER,
        "        for req_id in sync_failed_req_ids:\n",
        "        for req_id in sorted(sync_failed_req_ids)[:1]:\n",
        setups="failed",
    ),
    Mutant(
        "dropped output of a rewound request reads earlier rows",
        ROWS,
        "        buffer.emitted[state.slot] = np.iinfo(np.int64).max\n",
        "",
        setups="failed",
    ),
    Mutant(
        "blocks of a step that failed stay cached",
        SENTINEL,
        "        scheduler.kv_cache_manager.evict_blocks(set(range(num_blocks)))\n",
        "",
        setups="recovery",
    ),
    # Opt-in.
    Mutant(
        "silent requests get rows",
        CONFIG,
        "        return not self.routed_experts_opt_in if asked is None else asked\n",
        "        return True\n",
        setups="silent",
    ),
    Mutant(
        "engine with opt-in gives everybody rows",
        CONFIG,
        "        return not self.routed_experts_opt_in if asked is None else asked\n",
        "        return True if asked is None else asked\n",
        setups="opt-in",
    ),
    # Forced experts.
    Mutant(
        "hash without routes",
        BLOCKS,
        "        if digest is not None:\n",
        "        if False:\n",
        setups="forced",
    ),
    Mutant(
        "hash without the place of the routes in the block",
        FORCED,
        '            offset.to_bytes(8, "little") + rows',
        '            b"" + rows',
        setups="forced",
    ),
    Mutant(
        "rows of the token before",
        FORCED_WORKER,
        "                        start - forced.start : end - forced.start\n",
        "                        (at := max(start - forced.start - 1, 0)) : at + end - start\n",
        setups="forced",
    ),
    Mutant(
        "rows after the cached tokens begin one too early",
        FORCED,
        "self.start + skipped, self.rows[skipped:])",
        "self.start + skipped, self.rows[max(skipped - 1, 0) :])",
        setups="forced",
    ),
    Mutant(
        "rows of a step stay for the next one",
        FORCED_WORKER,
        "        self._forcer.clear()\n",
        "",
        setups="forced",
    ),
    Mutant(
        "rows forgotten after the first chunk",
        FORCED_WORKER,
        "                if end == forced.end:\n",
        "                if start < end:\n",
        setups="forced",
    ),
    Mutant(
        "forced experts not normalised",
        WEIGHTS,
        "log_scores.softmax(dim=-1) if renormalize else log_scores.exp()",
        "log_scores.exp()",
        setups="forced",
    ),
    Mutant(
        "forced experts not scaled",
        WEIGHTS,
        "    return weights * routed_scaling_factor\n",
        "    return weights\n",
        setups="forced",
    ),
    # Weights of the experts.
    Mutant(
        "weights before normalisation",
        CPU_ROUTER,
        "return _softmax_topk(router_logits, self.top_k, self.renormalize)",
        "return _softmax_topk(router_logits, self.top_k, False)",
        setups="expert_weights",
    ),
    Mutant(
        "weights of the experts that were replaced by forced ones",
        BASE_ROUTER,
        "        if self.force_fn is not None:\n"
        "            topk_weights, topk_ids = self.force_fn(\n"
        "                router_logits, topk_weights, topk_ids\n"
        "            )\n\n"
        "        if self.capture_weights_fn is not None:\n"
        "            self.capture_weights_fn(topk_weights)\n",
        "        if self.capture_weights_fn is not None:\n"
        "            self.capture_weights_fn(topk_weights)\n"
        "        if self.force_fn is not None:\n"
        "            topk_weights, topk_ids = self.force_fn(\n"
        "                router_logits, topk_weights, topk_ids\n"
        "            )\n\n",
        setups="expert_weights",
    ),
    Mutant(
        "weights split off by one",
        RECORD,
        'ascontiguousarray(rows.view(record)[..., 0]["weights"])',
        'roll(rows.view(record)[..., 0]["weights"], 1, -1)',
        setups="wide or expert_weights",
    ),
    Mutant(
        "weights sent to a request that asked for ids only",
        OUTPUT_PROCESSOR,
        "if record is not None and not self.returns_routed_experts_weights:",
        "if record is not None and self.returns_routed_experts_weights is None:",
        setups="expert_weights",
    ),
    Mutant(
        "weights sent in a message without a request that asked",
        CONNECTOR,
        "if self.record is not None and not any(",
        "if self.record is None and not any(",
        setups="wide",
    ),
    Mutant(
        "weights not sent to a request that asked",
        CONNECTOR,
        "message.outputs[i].request_id in weighing",
        "message.outputs[i].request_id in ()",
        setups="wide",
    ),
    Mutant(
        "later part of a session does not ask for weights",
        SCHEDULER,
        "session.sampling_params.return_routed_experts_weights",
        "None",
        setups="wide",
    ),
    # New weights.
    Mutant(
        "rows of returned tokens are sent again after a preemption",
        KNOWN,
        "            0 if request.num_output_tokens == 0 else request.num_tokens - 1,\n",
        "            0,\n",
        setups="preempted_later or cleared",
        examples=(1,),
        engines="tests/behaviour/test_weights.py",
    ),
    Mutant(
        "rows from before new weights count after a reset",
        CONNECTOR,
        "        self._generation += 1\n        self._is_lost = False\n",
        "        self._is_lost = False\n",
        setups="cleared or reset or change_of",
        examples=(1,),
        engines="tests/behaviour/test_weights.py",
    ),
    Mutant(
        "a session's rows begin again in its next part",
        KNOWN,
        "            return emitted\n",
        "            pass\n",
        setups="session",
        examples=(1,),
        engines="tests/v0_33_0/test_sessions.py",
    ),
    Mutant(
        "a sleep keeps offloaded KV of the old weights",
        ENGINE_CORE,
        "            reset_connector=reset_connector,\n        ):\n            raise RuntimeError",
        "            reset_connector=False,\n        ):\n            raise RuntimeError",
        setups="sleep",
        examples=(1,),
        engines="tests/v0_33_0/test_weight_updates.py",
    ),
]
