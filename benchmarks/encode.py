# SPDX-License-Identifier: Apache-2.0
"""What an answer's rows weigh and cost on the wire: bytes and milliseconds by number of tokens.

    python benchmarks/encode.py --out benchmarks/results/encode-cpu.md

Random rows of Qwen3-30B-A3B's shape, 48 layers and top-8, which do not compress. Encoding is what
the server does in a thread, and so is writing the JSON; `json.dumps` is what would be on its event
loop without that; decoding is the client's.
Milliseconds are the least of the rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

# Run as a file: the repository is not on the path.
sys.path.insert(0, str(Path(__file__).parents[1]))

LAYERS, TOP_K, EXPERTS = 48, 8, 128
TOKENS = (1_000, 8_000, 128_000)
HEADER = (
    "| Tokens | Rows, MB | Answer, MB | Base64 adds | Encode, ms | JSON, ms | json.dumps, ms "
    "| Decode, ms |\n"
    "| --- | --- | --- | --- | --- | --- | --- | --- |\n"
)


def least(rounds: int, call: Callable[[], Any]) -> tuple[float, Any]:
    """Milliseconds of the fastest call, and what it returned."""
    best = float("inf")
    for _ in range(rounds):
        began = time.perf_counter()
        result = call()
        best = min(best, time.perf_counter() - began)
    return 1e3 * best, result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path, help="file for the record, as Markdown")
    arguments = parser.parse_args()

    import numpy as np
    import vllm
    from vllm.entrypoints.routed_experts import encode_rows, to_json_response
    from vllm.entrypoints.serve.disagg.protocol import GenerateResponse, GenerateResponseChoice

    from examples.trainer.client import decode_rows

    rng = np.random.default_rng(0)
    lines = []
    for tokens in TOKENS:
        rows = rng.integers(0, EXPERTS, (tokens, LAYERS, TOP_K), dtype=np.uint8)
        encode_ms, text = least(arguments.rounds, lambda rows=rows: encode_rows(rows))
        answer = GenerateResponse(
            request_id="0",
            choices=[
                GenerateResponseChoice(
                    index=0,
                    token_ids=[0],
                    routed_experts=text,
                    routed_experts_start=0,
                    moe_layers=list(range(LAYERS)),
                )
            ],
        )
        loop = asyncio.new_event_loop()
        json_ms, response = least(
            arguments.rounds,
            lambda answer=answer, loop=loop: loop.run_until_complete(to_json_response(answer)),
        )
        body = response.body
        # As fastapi's JSONResponse writes it.
        dumps_ms, _ = least(
            arguments.rounds,
            lambda answer=answer: json.dumps(answer.model_dump(), ensure_ascii=False).encode(),
        )
        decode_ms, decoded = least(arguments.rounds, lambda text=text: decode_rows(text))
        assert np.array_equal(decoded, rows)
        lines.append(
            f"| {tokens:,} | {rows.nbytes / 1e6:.2f} | {len(body) / 1e6:.2f} "
            f"| {100 * (len(text) / rows.nbytes - 1):.1f} % "
            f"| {encode_ms:.2f} | {json_ms:.2f} | {dumps_ms:.2f} | {decode_ms:.2f} |"
        )
        print(lines[-1], flush=True)
    record = (
        "# Rows on the wire\n\n"
        f"`{' '.join(Path(word).name for word in sys.argv)}`: {LAYERS} layers, top-{TOP_K}, "
        f"uint8, the least of {arguments.rounds} rounds; vllm {vllm.__version__}, "
        f"Python {platform.python_version()}, one core. Encoding and JSON run in a thread; "
        "`json.dumps` would run on the server's event loop.\n\n" + HEADER + "\n".join(lines) + "\n"
    )
    if arguments.out:
        arguments.out.write_text(record)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
