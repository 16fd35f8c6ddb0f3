# SPDX-License-Identifier: Apache-2.0
"""A short run of `make stress-eplb`."""

from __future__ import annotations

from checks import eplb


def test_schedules_do_no_harm() -> None:
    assert eplb.main(["--schedules", "60"]) == 0
