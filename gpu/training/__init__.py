# SPDX-License-Identifier: Apache-2.0
"""Route replay in a training run on a GPU."""

STEPS_FILE = "training.jsonl"
# "plain" is TRL as it is released, without rows. It shows the time of a step without them.
ARMS = {
    "own": "without replay",
    "replay": "with replay",
    # Every third sample is interrupted by new weights, and resumed.
    "routed": "interrupted, routed again",
    "forced": "interrupted, forced experts",
    "plain": "without rows",
}
