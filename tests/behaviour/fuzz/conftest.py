# SPDX-License-Identifier: Apache-2.0
"""A server for each module, and a check that it is alive and right."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from harness import oracle
from harness.lines import LINES
from harness.server import Server
from tests import endpoints
from tests.behaviour.conftest import CHUNK, random_prompt


def weights_flag(line: str) -> list[str]:
    return ["--routed-experts-weights=float16"] * LINES[line].tests["returns_weights"]


@pytest.fixture(scope="module")
def server(model: Path, line: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    arguments = ["--enable-return-routed-experts", f"--max-num-batched-tokens={CHUNK}"]
    # Long answers and many choices would only take time, as compiling would.
    arguments += ["--max-model-len=64", "--enforce-eager", *weights_flag(line)]
    log = tmp_path_factory.mktemp("server") / "server.log"
    env = {**endpoints.ENVIRONMENT, "VLLM_MAX_N_SEQUENCES": "4"}
    with Server(model, log=log, args=arguments, env=env, line=line) as server:
        yield server


@pytest.fixture(scope="module")
def check_server(server: Server, model: Path) -> Callable[[], None]:
    """Checks that the server is alive and right."""
    probe = random_prompt(2, 9)
    first = server.generate(probe, max_tokens=3)
    routes = oracle.route(model, [*probe, *first.token_ids])

    def check() -> None:
        answer = server.generate(probe, max_tokens=3)
        assert answer.token_ids == first.token_ids
        assert len(answer.rows) == len(probe) + 2
        assert oracle.compare(answer.rows, routes).agree == len(answer.rows)

    return check
