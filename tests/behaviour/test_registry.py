# SPDX-License-Identifier: Apache-2.0
"""The families that the record calls tested are tested."""

from __future__ import annotations

import re

from harness.lines import LINES
from tests.real import PROJECT


def test_families_that_the_record_calls_tested_are_those_of_the_tests(line: str) -> None:
    text = (PROJECT.root / "benchmarks/results/families.md").read_text(encoding="utf-8")
    header, *rows = [
        [cell.strip(" `") for cell in row.strip("|").split("|")]
        for row in re.findall(r"^\| (?:Family|`).*", text, re.MULTILINE)
    ]
    column = header.index(f"Series {line}")
    tested = {row[0] for row in rows if row[column] == "yes"}
    assert tested == LINES[line].tests["families"].keys()
