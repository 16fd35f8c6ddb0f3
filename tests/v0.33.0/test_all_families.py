# SPDX-License-Identifier: Apache-2.0
"""Every family that `transformers` and this line share and that runs on a CPU: every row is what
the router of `transformers` selects.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from harness.engine_v0_33_0 import OPTIONS
from harness.on_cpu import TESTED
from tests.behaviour.conftest import environment  # noqa: F401
from tests.behaviour.test_all_families import (  # noqa: F401
    Answered,
    answer,
    test_rows_after_a_cached_prefix_are_what_the_routers_select,
    test_rows_have_the_form_of_the_model,
    test_rows_of_a_batch_are_what_the_routers_of_transformers_select,
)

pytestmark = pytest.mark.slow

FAMILIES = TESTED["v0.33.0"]


@pytest.fixture(scope="module", params=FAMILIES)
def answered(request: pytest.FixtureRequest, checkpoint: Callable[..., Path]) -> Answered:
    # vLLM runs some families through their classes in `transformers`, and changes these classes for
    # the compiler. The oracle uses the same classes, and nothing is compiled here.
    base = "vllm.model_executor.models.transformers.base.Base"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(f"{base}._decorate_for_torch_compile", lambda self: None)
        return answer(checkpoint(request.param, **FAMILIES[request.param]), **OPTIONS)
