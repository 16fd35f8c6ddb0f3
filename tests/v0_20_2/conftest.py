# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the tests that run engines."""

from tests.behaviour.conftest import checkpoint, environment, model

__all__ = ["checkpoint", "environment", "model"]
