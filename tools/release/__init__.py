# SPDX-License-Identifier: Apache-2.0
"""Releases of the series; nothing is ever pushed or published."""
