# SPDX-License-Identifier: Apache-2.0
"""Every MoE model of the release and of `transformers` is tested, or listed with a reason."""

from __future__ import annotations

import pytest

from harness.on_cpu import NOT_IN_TRANSFORMERS, NOT_TESTED, TESTED
from tests import registry


@pytest.fixture
def line() -> str:
    return "v0.20.2"


def test_every_moe_family_of_transformers_is_listed(line: str) -> None:
    listed = {*TESTED[line], *NOT_TESTED[line]}
    assert registry.moe_families() - listed == set()
    assert listed - registry.families().keys() == set()


def test_every_moe_architecture_that_transformers_lacks_is_listed(line: str) -> None:
    known = set().union(*registry.families().values())
    for overrides in TESTED[line].values():
        known.update(overrides.get("architectures", ()))
    assert registry.moe_architectures() - known == set(NOT_IN_TRANSFORMERS[line])
