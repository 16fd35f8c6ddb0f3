# SPDX-License-Identifier: Apache-2.0
"""No request stops the server of this line or harms the next one: tests of the first line."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.behaviour.test_fuzz import (  # noqa: F401
    any_server,
    check_server,
    opt_in_server,
    server,
    test_arguments_of_any_value_do_no_harm_on_any_endpoint,
    test_hostile_value_is_a_400_that_names_the_argument,
    test_log_names_no_error,
    test_log_of_the_server_with_opt_in_names_no_error,
    test_requests_from_the_schema_do_no_harm,
)
from tests.carriers import (  # noqa: F401
    server_without_rows,
    test_prompt_rows_at_a_server_without_rows_do_no_harm,
    test_prompt_rows_for_several_readers_are_a_400,
    test_prompt_rows_of_any_value_do_no_harm_on_any_endpoint,
    test_prompt_rows_of_who_gets_none_do_no_harm,
    test_prompt_rows_that_cannot_be_the_prompts_are_a_400_with_one_sentence,
    test_prompt_rows_that_say_nothing_or_what_is_known_are_taken,
)

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def line() -> str:
    return Path(__file__).parent.name
