# SPDX-License-Identifier: Apache-2.0
"""Every MoE model of the release and of `transformers` is tested, or documented with a reason."""

from tests.behaviour.test_registry import *  # noqa: F403
