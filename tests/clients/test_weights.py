# SPDX-License-Identifier: Apache-2.0
"""Trainers' own paths for weights: the rows are those of the weights that were sent."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from examples.client import PATH
from harness import oracle
from harness.checkpoint import make_checkpoint
from harness.server import Server, read_answer
from tests.clients.conftest import CLIENTS, HERE
from tests.clients.driving import LENGTH, PROMPT, read_record, refuse_error
from tests.clients.recorder import ENVIRONMENT, GENERATED, LINE, Engine

pytestmark = [pytest.mark.clients, pytest.mark.timeout(1800)]

STEPS = {"old weights": 0, "new weights": 1, "old weights again": 0, "the same weights": 0}


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Checkpoints of the same model."""
    folder = tmp_path_factory.mktemp("weights")
    config = {"mlp_only_layers": [0], "max_position_embeddings": LENGTH}
    return [make_checkpoint(folder / str(seed), seed=seed, **config) for seed in (0, 1)]


def count_wrong(checkpoint: Path, file: Path) -> int:
    (turn,) = read_record(file)
    (completion,) = turn.completions()
    comparison = oracle.compare(completion.rows, oracle.route(checkpoint, turn.sequence[:-1]))
    assert comparison.rows == len(turn.sequence) - 1
    return comparison.rows - comparison.agree


@pytest.fixture(scope="module")
def verl_records(
    weights: list[Path],
    run_engine: Callable[..., Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    folder = tmp_path_factory.mktemp("verl-weights")
    return run_engine(
        "verl, its server", "engine_verl_weights", weights[0], folder, WEIGHTS=str(weights[1])
    )


@pytest.mark.parametrize("step", STEPS)
def test_rows_are_of_the_weights_that_verl_sent(
    step: str, verl_records: Path, weights: list[Path]
) -> None:
    refuse_error(verl_records, step)
    sent = STEPS[step]
    assert count_wrong(weights[sent], verl_records / f"{step}.json") == 0
    assert count_wrong(weights[1 - sent], verl_records / f"{step}.json") > 0


@contextmanager
def control(url: str) -> Iterator[Callable[[str], None]]:
    """Calls methods of SkyRL's client for the control of servers."""
    program = [CLIENTS["SkyRL"].environment / "bin/python", HERE / "pauses_skyrl.py", url]
    env = {**os.environ, "PYTHONPATH": "", "NO_PROXY": "127.0.0.1"}
    with subprocess.Popen(
        program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env, text=True
    ) as client:
        assert client.stdin
        assert client.stdout

        def call(method: str) -> None:
            print(method, file=client.stdin, flush=True)
            assert client.stdout.readline() == "done\n"

        yield call
        client.stdin.close()


def test_rows_of_a_request_that_skyrl_pauses_change_with_the_weights(
    weights: list[Path], tmp_path: Path
) -> None:
    """SkyRL keeps running requests and their KV, and gives later requests another salt."""
    arguments = ["--enable-return-routed-experts", f"--max-model-len={LENGTH}"]
    log = tmp_path / "server.log"
    with (
        Server(weights[0], log, arguments, ENVIRONMENT, line=LINE) as server,
        control(server.url) as skyrl,
        ThreadPoolExecutor(1) as background,
    ):
        engine = Engine(server, np.random.default_rng(0))
        prompt = engine.say(PROMPT)
        asked = background.submit(engine.send, prompt, max_tokens=900)
        engine.wait_for(GENERATED, 8, asked)
        skyrl("pause_generation")
        assert not asked.done()
        reload = {"method": "reload_weights", "kwargs": {"weights_path": str(weights[1])}}
        server.post("/collective_rpc", reload)
        skyrl("resume_generation")
        turn = asked.result()
        body = {"cache_salt": "1", "token_ids": prompt, "sampling_params": {"max_tokens": 4}}
        later = read_answer(prompt, server.post(PATH, body))

    (completion,) = turn.completions()
    tokens, rows = turn.sequence[:-1], completion.rows
    old = oracle.compare(rows, oracle.route(weights[0], tokens))
    assert 0 < old.agree < len(rows)
    # The old weights computed all before it; by chance, a row of the new ones can equal theirs.
    most = old.disagreements[0].position
    assert most > PROMPT
    assert any(
        oracle.compare(
            rows, oracle.route_in_turns((weights[0], tokens[:n]), (weights[1], tokens[n:]))
        ).agree
        == len(rows)
        for n in range(most, most - 4, -1)
    )
    truth = oracle.route(weights[1], [*prompt, *later.token_ids[:-1]])
    assert oracle.compare(later.rows, truth).agree == len(later.rows)
