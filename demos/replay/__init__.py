# SPDX-License-Identifier: Apache-2.0
"""Route replay, measured on a small MoE model."""
