# SPDX-License-Identifier: Apache-2.0
"""What rows cost the host, on either line."""

TOP_K = 8
EXPERTS = 256
BLOCK = 16
PARTS = (
    "scheduler",
    "scheduler to worker",
    "worker",
    "worker to scheduler",
    "to the front end",
    "front end",
)
