# SPDX-License-Identifier: Apache-2.0
"""The documentation's list of models is that of the tests."""

from __future__ import annotations

from pathlib import Path

from harness.on_cpu import NOT_IN_TRANSFORMERS, NOT_TESTED, TESTED

ROOT = Path(__file__).parents[1]


def test_documentation_lists_the_families_of_the_tests() -> None:
    tables = [{**dict.fromkeys(TESTED[line], "yes"), **NOT_TESTED[line]} for line in TESTED]
    rows = [
        f"| `{family}` | " + " | ".join(table.get(family, "-") for table in tables) + " |"
        for family in sorted({family for table in tables for family in table})
    ]
    text = (ROOT / "docs/features.md").read_text(encoding="utf-8")
    listed = [row for row in text.split("## Models")[1].splitlines() if row.startswith("| `")]
    assert listed == rows


def test_documentation_lists_the_models_that_transformers_lacks() -> None:
    text = " ".join((ROOT / "docs/features.md").read_text(encoding="utf-8").split())
    for line, names in NOT_IN_TRANSFORMERS.items():
        assert f"- {line}: " + ", ".join(f"`{name}`" for name in names) in text


def test_no_family_is_both_tested_and_not() -> None:
    for line, families in TESTED.items():
        assert not families.keys() & NOT_TESTED[line].keys()
