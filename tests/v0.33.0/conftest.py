# SPDX-License-Identifier: Apache-2.0
"""The checkpoints, the client and the profiles of the first line's tests."""

import tests.property.conftest  # noqa: F401  (registers hypothesis profiles)
from tests.behaviour.conftest import checkpoint, model  # noqa: F401
from tests.behaviour.test_openai import client  # noqa: F401
