# SPDX-License-Identifier: Apache-2.0
"""`vllm serve` of this line: completions and chat, whole and streamed, return true rows."""

import pytest

from tests.behaviour.test_openai import *  # noqa: F403

pytestmark = pytest.mark.slow
