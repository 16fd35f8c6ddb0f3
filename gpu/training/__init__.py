# SPDX-License-Identifier: Apache-2.0
"""Route replay in a training run on a GPU."""

STEPS_FILE = "training.jsonl"
# Of these, the last one asks for no rows: it is TRL as it is released, for the time of a step.
ARMS = {"own": "without replay", "replay": "with replay", "plain": "without rows"}
