# SPDX-License-Identifier: Apache-2.0
"""Offline use: the rows of one prompt through `LLM.generate`.

    python -m examples.offline CHECKPOINT RESULT.json

Writes {"shape": [rows, layers, top-k] or null, "dtype": str, "nonzero": int} for the
`routed_experts` of the completion. `make demo-pristine` runs it with vLLM without the series.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

PROMPT_TOKENS = 100
NEW_TOKENS = 16


def main(checkpoint: str, result: str) -> None:
    """Generate, and write shape, dtype and number of nonzero ids to the file `result`."""
    import numpy as np
    from vllm import LLM, SamplingParams

    engine = LLM(
        checkpoint,
        dtype="float32",
        enforce_eager=True,
        max_model_len=256,
        max_num_seqs=2,
        block_size=32,
        kv_cache_memory_bytes=16 << 20,
        enable_return_routed_experts=True,
    )
    prompt = {"prompt_token_ids": list(range(4, 4 + PROMPT_TOKENS))}
    params = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True)
    rows = engine.generate([prompt], params, use_tqdm=False)[0].outputs[0].routed_experts
    found = {
        "shape": None if rows is None else list(rows.shape),
        "dtype": "" if rows is None else str(rows.dtype),
        "nonzero": 0 if rows is None else int(np.count_nonzero(rows)),
    }
    Path(result).write_text(json.dumps(found) + "\n")


# vLLM imports this module again in its workers: the guard is needed.
if __name__ == "__main__":
    main(*sys.argv[1:])
