# SPDX-License-Identifier: Apache-2.0
"""Every MoE model of the release and of `transformers` is tested, or documented with a reason."""

from __future__ import annotations

from harness.lines import LINES
from tests import registry


def test_every_moe_family_of_transformers_is_documented(line: str) -> None:
    documented = registry.documented_families(line)
    assert registry.moe_families() - documented.keys() == set()
    assert documented.keys() - registry.families().keys() == set()


def test_families_that_the_documentation_calls_tested_are_those_of_the_tests(line: str) -> None:
    documented = registry.documented_families(line)
    tested = {family for family, how in documented.items() if how == "yes"}
    assert tested == LINES[line].tests["families"].keys()


def test_every_moe_architecture_that_transformers_lacks_is_documented(line: str) -> None:
    known = set().union(*registry.families().values())
    for overrides in LINES[line].tests["families"].values():
        known.update(overrides.get("architectures", ()))
    assert registry.moe_architectures() - known == registry.documented_architectures(line)
