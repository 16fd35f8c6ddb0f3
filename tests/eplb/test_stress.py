# SPDX-License-Identifier: Apache-2.0
"""A short run of `make stress-eplb`."""

from __future__ import annotations

from tests.eplb import stress


def test_schedules_do_no_harm() -> None:
    assert stress.main(["--schedules", "60"]) == 0
