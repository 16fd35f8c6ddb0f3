# SPDX-License-Identifier: Apache-2.0
"""Code to copy: a client, route replay in a trainer, a prefill/decode proxy, and offline use."""
