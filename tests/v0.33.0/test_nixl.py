# SPDX-License-Identifier: Apache-2.0
"""A prefill and a decode engine of this line send KV with NIXL."""

from tests.behaviour.test_nixl import *  # noqa: F403
