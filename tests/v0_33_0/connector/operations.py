# SPDX-License-Identifier: Apache-2.0
"""What may happen to an engine in v0.33.0's property test, in any order: methods of `Engine`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hypothesis import strategies as st

from tests.sequence import VOCABULARY
from tests.v0_33_0.connector.faults import PLACES
from tests.v0_33_0.connector.setups import Setup

Operation = tuple[str, tuple[Any, ...], dict[str, Any]]

# Few different tokens at few lengths: requests share prefixes often.
PROMPTS = st.builds(
    lambda family, length, tail: [(family * 7 + i) % VOCABULARY for i in range(length)] + tail,
    st.integers(0, 1),
    st.integers(1, 24),
    st.lists(st.integers(0, 3), max_size=2),
)
TAILS = st.lists(st.integers(0, 3), min_size=1, max_size=3)
DRAFTS = st.lists(st.booleans(), min_size=3, max_size=3)
STARTS = st.sampled_from([0, 0, 0, 5, 100])
LENGTHS = st.integers(1, 12)


def operation(name: str, *arguments: Any, **more: Any) -> st.SearchStrategy[Operation]:
    return st.tuples(st.just(name), st.tuples(*arguments), st.fixed_dictionaries(more))


COMMON = [
    operation("add", PROMPTS, LENGTHS, STARTS),
    operation("add", PROMPTS, LENGTHS, STARTS),
    operation("add", PROMPTS, LENGTHS, STARTS, prompt_logprobs=st.just(0)),
    operation("compute_again", st.integers(0, 20), st.integers(1, 4)),
    operation("add_group", PROMPTS, st.integers(1, 8), st.integers(2, 3)),
    operation("add_turn", st.integers(0, 20), TAILS, st.integers(1, 6)),
    *[operation("schedule", DRAFTS)] * 3,
    operation("schedule_and_abort", DRAFTS, st.integers(0, 20)),
    operation("consume"),
    operation("deliver"),
    operation("abort", st.integers(0, 20)),
]
MORE = {
    "silent": [operation("add", PROMPTS, LENGTHS, return_routed_experts=st.just(False))],
    "session": [
        operation("converse", PROMPTS, st.integers(1, 6), STARTS, st.lists(TAILS, max_size=3)),
        *[operation("extend", st.integers(0, 5), TAILS, st.integers(1, 5), st.integers(0, 2))] * 2,
    ],
    "reset": [operation("reset", st.booleans()), operation("reset_beside_waiting", PROMPTS)],
    "update": [operation("update"), operation("outdate", PROMPTS, st.integers(0, 3))],
    "keep": [operation("keep"), operation("outdate", PROMPTS, st.integers(0, 3))],
    "reload": [
        operation(
            "reload",
            PROMPTS,
            st.integers(2, 3),
            st.one_of(st.none(), st.integers(0, 5)),
            st.booleans(),
        )
    ],
    "receive": [operation("receive", PROMPTS, st.integers(1, 8), STARTS, st.booleans())] * 2,
    "fail": [operation("fail", st.integers(0, 5))],
    "abandon": [
        operation(
            "abandon",
            PROMPTS,
            st.integers(2, 3),
            st.integers(0, 5),
            st.booleans(),
            st.lists(st.booleans(), max_size=2),
        )
    ],
    "join": [operation("join", PROMPTS, st.integers(0, 5), st.booleans())],
    "preempt": [operation("preempt", st.integers(0, 20))],
    "fault": [operation("break_next", st.lists(st.sampled_from(PLACES), min_size=1, max_size=2))],
    "crash": [operation("crash", DRAFTS, st.sampled_from(["before", "begun", "prepared"]))],
}


def sequences(
    setup: Setup, more: Sequence[st.SearchStrategy[Operation]] = ()
) -> st.SearchStrategy[list[Operation]]:
    """Sequences of what may happen to an engine of the setup."""
    operations = [*COMMON, *more, *(operation for name in setup.also for operation in MORE[name])]
    return st.lists(st.one_of(operations), min_size=4, max_size=40)
