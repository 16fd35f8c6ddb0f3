# SPDX-License-Identifier: Apache-2.0
"""Every MoE model of the release and of `transformers` is tested, or listed with a reason."""

from __future__ import annotations

import pytest

from tests.behaviour.test_registry import (  # noqa: F401
    test_every_moe_architecture_that_transformers_lacks_is_listed,
    test_every_moe_family_of_transformers_is_listed,
)


@pytest.fixture
def line() -> str:
    return "v0.33.0"
