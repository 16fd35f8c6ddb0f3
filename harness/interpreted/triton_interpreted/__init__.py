# SPDX-License-Identifier: Apache-2.0
"""A Triton backend named "cpu" for TRITON_INTERPRET=1: it tells vLLM that Triton kernels can run on
this CPU. The interpreter runs them, and nothing is compiled."""
