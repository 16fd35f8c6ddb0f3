# SPDX-License-Identifier: Apache-2.0
"""Code to copy: a client, route replay in a trainer, and a prefill/decode proxy."""
