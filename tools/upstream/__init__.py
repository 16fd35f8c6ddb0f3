# SPDX-License-Identifier: Apache-2.0
"""What is for vLLM: its own tests, checks of each patch, branches to send."""
