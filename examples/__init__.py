# SPDX-License-Identifier: Apache-2.0
"""Programs that show what a vLLM with returned routed experts can do."""
