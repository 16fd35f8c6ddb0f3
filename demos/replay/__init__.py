# SPDX-License-Identifier: Apache-2.0
"""For trainers: a client that reads routed experts, and a model that replays them."""
