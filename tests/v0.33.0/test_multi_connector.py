# SPDX-License-Identifier: Apache-2.0
"""Engines of this line with two connectors."""

from tests.behaviour.test_multi_connector import *  # noqa: F403
