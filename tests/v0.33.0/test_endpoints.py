# SPDX-License-Identifier: Apache-2.0
"""The table of endpoints, walked with servers of this line.

The tests are those of the first line's `tests/behaviour/test_endpoints.py`.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.behaviour.test_endpoints import (  # noqa: F401
    arguments,
    server,
    skip_what_is_not_served,
    test_log_names_no_error,
    test_offline_requests_get_rows_if_they_ask,
    test_requests_of_a_batch_file_get_rows_if_they_ask,
    test_rows_come_with_the_last_chunk_if_asked,
    test_silent_request_is_captured_only_where_it_gets_rows,
    test_two_ways_that_differ_are_refused,
    test_values_are_the_same_on_both_lines,
    test_who_asks_gets_rows_or_a_refusal_that_names_the_endpoint,
)

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def line() -> str:
    return Path(__file__).parent.name
