# SPDX-License-Identifier: Apache-2.0
"""The checkpoints and the client of the first line's tests."""

from tests.behaviour.conftest import checkpoint, model
from tests.behaviour.test_openai import client

__all__ = ["checkpoint", "client", "model"]
