# SPDX-License-Identifier: Apache-2.0
"""What demos, tests, benchmarks and GPU programs share: a server, checkpoints, and oracles."""
