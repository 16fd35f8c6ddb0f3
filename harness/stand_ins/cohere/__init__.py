# SPDX-License-Identifier: Apache-2.0
"""Stand-in for the package `cohere`, whose types `/cohere/v2/chat` of v0.33.0 uses."""
