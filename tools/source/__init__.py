# SPDX-License-Identifier: Apache-2.0
"""The pinned source of vLLM, and downloads."""
