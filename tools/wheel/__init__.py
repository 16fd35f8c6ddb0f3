# SPDX-License-Identifier: Apache-2.0
"""Wheels: the base wheel with the series laid over it."""
