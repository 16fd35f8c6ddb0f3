# SPDX-License-Identifier: Apache-2.0
"""The checkpoints of the first line's tests."""

from tests.behaviour.conftest import checkpoint, model

__all__ = ["checkpoint", "model"]
