# SPDX-License-Identifier: Apache-2.0
"""The table of endpoints, walked with servers of this line."""

from tests.behaviour.test_endpoints import *  # noqa: F403
