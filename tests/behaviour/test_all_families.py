# SPDX-License-Identifier: Apache-2.0
"""Every family that `transformers` and this line share and that runs on a CPU: every row is what
the router of `transformers` selects.

Families whose rows need another oracle, the logits of the same forward, are in `test_families.py`:
DeepSeek-V2 and V3, and gpt-oss.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from harness import oracle
from harness.checkpoint import family_of
from harness.on_cpu import TESTED
from tests.behaviour.conftest import BLOCK, CHUNK, ask, assert_all_true, random_prompt, running

pytestmark = pytest.mark.slow

FAMILIES = TESTED["v0.20.2"]


def assert_rows_of_family(model: Path, **options: Any) -> None:
    """Rows of a batch, of several chunks, and after a cached prefix are those of `transformers`."""
    prompts = [random_prompt(i, n) for i, n in enumerate((5, 2 * CHUNK + 9, 1))]
    if family_of(model).vision is not None:
        # The checkpoint has no image processor.
        options["limit_mm_per_prompt"] = {"image": 0, "video": 0}
    # An engine that runs a model of `transformers` changes its class for the whole process: load
    # the oracle first.
    oracle.route(model, prompts[0])
    with running(model, **options) as llm:
        outputs = ask(llm, *prompts, max_tokens=BLOCK)
        conversation = [*prompts[1], *outputs[1].outputs[0].token_ids, *random_prompt(9, 7)]
        outputs += ask(llm, conversation)
    assert_all_true(model, outputs)


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_are_what_the_routers_of_transformers_select(
    family: str, checkpoint: Callable[..., Path]
) -> None:
    overrides: Mapping[str, Any] = FAMILIES[family]
    assert_rows_of_family(checkpoint(family, **overrides))
