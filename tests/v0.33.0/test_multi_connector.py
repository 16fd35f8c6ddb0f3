# SPDX-License-Identifier: Apache-2.0
"""A prefill and a decode engine of this line send KV with NIXL and share it through files too
(MultiConnector)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from harness import disaggregated
from harness.disaggregated import Pair
from tests.behaviour.test_multi_connector import (
    test_answer_of_two_connectors_has_every_row_from_the_asked_one_on,
)

# This test runs here as it is.
__all__ = ["test_answer_of_two_connectors_has_every_row_from_the_asked_one_on"]

pytestmark = pytest.mark.slow

LINE = Path(__file__).parent.name


@pytest.fixture(scope="module")
def pair(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    folder = tmp_path_factory.mktemp("multi")
    way = disaggregated.both(folder / "kv")
    with disaggregated.running(model, folder, way, LINE) as pair:
        yield pair
