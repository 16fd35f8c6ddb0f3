# SPDX-License-Identifier: Apache-2.0
"""A training loop with and without route replay, on a small MoE model."""

ARMS = {"own": "without replay", "replay": "with replay"}
STEPS_FILE = "steps.jsonl"
# What `--break` does.
FAULTS = {
    "rows": "each row is that of the token before",
    "weights": "new weights are not sent",
    "cache": "the prefix cache is not cleared",
}
