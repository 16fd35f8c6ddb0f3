# SPDX-License-Identifier: Apache-2.0
"""Answers of `/inference/v1/generate` in the form that prime-rl's own server gives them, for
verifiers (tried with 0.4.1.dev86) and renderers (0.1.13.dev17).

    install()  # once, before the first request

Start the server with `--enable-return-routed-experts` alone: verifiers does not ask for rows by
request, only for where they start.
"""

from __future__ import annotations

import base64
from typing import Any

from examples.client import decode_rows


def install() -> None:
    """Make renderers read our answers."""
    from renderers import client

    parse = client.parse_generate_response

    def parse_and_reencode(raw: bytes) -> dict[str, Any]:
        return reencode(parse(raw))

    client.parse_generate_response = parse_and_reencode


def reencode(answer: dict[str, Any]) -> dict[str, Any]:
    """Replace the `.npy` of each choice of an answer, in place, by the fields that verifiers reads.
    Raises RoutedExpertsError for rows that cannot be read."""
    for choice in answer["choices"]:
        if isinstance(choice.get("routed_experts"), str):
            rows = decode_rows(choice["routed_experts"])
            choice["routed_experts"] = {
                "data": base64.b64encode(rows.tobytes()).decode(),
                "shape": list(rows.shape),
                "dtype": str(rows.dtype),
                # Without it, verifiers takes the rows for those of the whole sequence.
                "start": choice["routed_experts_start"],
            }
    return answer
