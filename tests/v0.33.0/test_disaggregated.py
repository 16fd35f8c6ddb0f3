# SPDX-License-Identifier: Apache-2.0
"""A prefill and a decode engine of this line share KV through files."""

from tests.behaviour.test_disaggregated_engines import *  # noqa: F403
