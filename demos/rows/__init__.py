# SPDX-License-Identifier: Apache-2.0
"""The demo: the expert routing of a small MoE model, end to end on a CPU."""
