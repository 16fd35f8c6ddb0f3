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
from tests.behaviour.test_all_families import assert_rows_of_family

pytestmark = pytest.mark.slow

FAMILIES = TESTED["v0.33.0"]


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_are_what_the_routers_of_transformers_select(
    family: str, checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    # vLLM runs some families through their classes in `transformers`, and changes these classes for
    # the compiler. The oracle uses the same classes, and nothing is compiled here.
    base = "vllm.model_executor.models.transformers.base.Base"
    monkeypatch.setattr(f"{base}._decorate_for_torch_compile", lambda self: None)
    assert_rows_of_family(checkpoint(family, **FAMILIES[family]), **OPTIONS)
