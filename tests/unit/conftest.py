# SPDX-License-Identifier: Apache-2.0
"""Without engines."""

from tests.behaviour.conftest import checkpoint  # noqa: F401
