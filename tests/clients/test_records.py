# SPDX-License-Identifier: Apache-2.0
"""A behaviour that fails leaves the records of the others standing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.clients.driving import Turn, read_record, refuse_error, try_record


def fails() -> Iterator[Turn]:
    yield Turn([1], 0, [])
    raise OSError("the server is gone")


def test_behaviour_that_fails_leaves_its_error_and_the_next_one_is_recorded(tmp_path: Path) -> None:
    turn = Turn([1, 2], 0, [{"choices": []}])
    try_record(tmp_path, "bad", fails())
    try_record(tmp_path, "good", iter([turn]))
    assert read_record(tmp_path / "good.json") == [turn]
    assert not (tmp_path / "bad.json").exists()
    refuse_error(tmp_path, "good")
    with pytest.raises(AssertionError, match="the server is gone"):
        refuse_error(tmp_path, "bad")
