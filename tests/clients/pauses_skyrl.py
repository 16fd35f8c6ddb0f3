# SPDX-License-Identifier: Apache-2.0
"""SkyRL's control of a server, in its environment: `python pauses_skyrl.py URL`. It calls the
method that each line of its input names, and answers with a line."""

from __future__ import annotations

import sys

from skyrl.backends.skyrl_train.weight_sync.control_plane import SkyrlWeightSyncClient

if __name__ == "__main__":
    client = SkyrlWeightSyncClient([sys.argv[1]])
    for line in sys.stdin:
        getattr(client, line.strip())()
        print("done", flush=True)
