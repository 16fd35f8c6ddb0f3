# SPDX-License-Identifier: Apache-2.0
"""Prefill and decode in two engines, and the rows of both in one answer."""
