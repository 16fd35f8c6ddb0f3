# SPDX-License-Identifier: Apache-2.0
"""`vllm serve` of v0.33.0: completions and chat, whole and streamed, return true rows. Most tests
are in `tests/behaviour/test_openai.py`, which v0.20.2 uses too."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.behaviour.test_openai import (  # noqa: F401
    server,
    test_every_choice_has_true_rows,
    test_every_prompt_of_a_list_has_its_rows,
    test_metrics_count_rows_and_store,
    test_rows_of_text_that_is_kept_back_wait,
    test_rows_start_where_asked,
)

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def line() -> str:
    return Path(__file__).parent.name
