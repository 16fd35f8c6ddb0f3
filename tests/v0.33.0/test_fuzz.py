# SPDX-License-Identifier: Apache-2.0
"""No request stops the server of this line or harms the next one: tests of the first line."""

from tests.behaviour.test_fuzz import *  # noqa: F403
