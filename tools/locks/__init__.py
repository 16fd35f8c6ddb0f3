# SPDX-License-Identifier: Apache-2.0
"""Locks: what the environments and images are made of."""
