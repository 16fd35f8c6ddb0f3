# SPDX-License-Identifier: Apache-2.0
"""Random operations: calls of the methods of `Engine`."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from tests.sequence import VOCABULARY
from tests.v0_20_2.faults import FAULTS
from tests.v0_20_2.setups import BLOCK, Setup

# Few different tokens at few lengths: requests share prefixes often, and end with a block.
PROMPTS = st.builds(
    lambda family, length, tail: [(family * 7 + i) % VOCABULARY for i in range(length)] + tail,
    st.integers(0, 1),
    st.one_of(st.sampled_from([BLOCK, 2 * BLOCK]), st.integers(1, 24)),
    st.lists(st.integers(0, 3), max_size=2),
)
TAILS = st.lists(st.integers(0, 3), min_size=1, max_size=3)


def operation(name: str, *arguments: Any) -> st.SearchStrategy[Any]:
    """A method of `Engine`, and arguments."""
    return st.tuples(st.just(name), *arguments)


def operations(setup: Setup) -> st.SearchStrategy[list[Any]]:
    """Those that may do something in this setup."""
    kinds = [
        operation(
            *("add", PROMPTS, st.one_of(st.just(1), st.integers(1, 12))),
            st.sampled_from([True, True, True, False]),
            st.sampled_from([0, 0, 0, 5, 100]),
            st.sampled_from([None, None, None, "salt"]),
            *(st.booleans(), st.booleans()),
            st.sampled_from([False, False, False, True]),
        ),
        operation("add_group", PROMPTS, st.integers(1, 8), st.integers(2, 3)),
        operation(
            *("add_relay", PROMPTS, st.integers(1, 4), st.integers(1, 4)),
            st.sampled_from([None, 0, 1, 2]),
            st.sampled_from([None, None, "aborted", "preempted"] if setup.connector else [None]),
        ),
        operation("add_turn", st.integers(0, 20), TAILS, st.integers(1, 6)),
        *[operation("schedule", st.lists(st.booleans(), min_size=3, max_size=3))] * 4,
        operation("deliver"),
        operation("abort", st.integers(0, 20)),
        operation("preempt", st.integers(0, 20)),
        operation("reset", st.booleans()),
        operation("change_weights"),
        operation("break_step", st.sampled_from(FAULTS), st.integers(0, 5)),
    ]
    if setup.connector:
        kinds += [operation("lose", st.integers(0, 5))] * 2
        kinds.append(operation("break_failed_load", PROMPTS, st.integers(0, 5), st.booleans()))
    if setup.sessions:
        kinds += [
            operation("add_session", PROMPTS, st.integers(1, 6)),
            *[operation("extend_session", st.integers(0, 3), TAILS, st.integers(1, 6))] * 2,
        ]
    return st.lists(st.one_of(kinds), min_size=6, max_size=50)
