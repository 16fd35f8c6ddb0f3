# SPDX-License-Identifier: Apache-2.0
"""Route replay in each trainer of `make replay`, against gradients of runs without replay."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from demos.replay import trainers
from demos.replay.__main__ import PROGRAMS, run_trainer
from demos.replay.mismatch import BATCH, read_gradients
from demos.replay.report import MAX_GRADIENTS
from demos.replay.trainers import Trained
from examples.client import Completion
from harness.checkpoint import make_checkpoint
from harness.lines import LINES
from tests.clients.recorder import LINE
from tests.unit.test_replay import complete

pytestmark = pytest.mark.skipif(
    not LINES[LINE].tests["replays"], reason="`make replay` does not run on this line"
)

LAYERS = 3
# Prompts differ in length, so batches have padding; processes have equally many sampled tokens.
LENGTHS = [range(20 + i, 60 + i) for i in range(18)]


def sample(checkpoint: Path) -> list[Completion]:
    """Random tokens with the log-probs and routes of the model itself in float32."""
    model = trainers.load(checkpoint, torch.float32)
    rng = np.random.default_rng(0)
    return [
        complete(model, checkpoint, rng.integers(4, 700, span.stop).tolist(), span.start)
        for span in LENGTHS
    ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What programs of trainers get."""
    folder = tmp_path_factory.mktemp("replay")
    checkpoint = make_checkpoint(
        folder / trainers.CHECKPOINT,
        dtype="bfloat16",
        num_hidden_layers=LAYERS,
        moe_intermediate_size=32,
        router_std=0.125,
    )
    trainers.prepare(folder, trainers.load(checkpoint, torch.float32), sample(checkpoint))
    return folder


@pytest.fixture(scope="module")
def plain(folder: Path) -> Trained:
    """The Hugging Face model in this process."""
    return trainers.train("plain", trainers.load, folder)


def test_run_without_replay_has_the_models_gradients_where_it_is_given_its_own_routes(
    folder: Path,
) -> None:
    model = trainers.load(folder / trainers.CHECKPOINT, torch.float32)
    batch = trainers.read(folder, "completions")[:BATCH]
    found = trainers.wanted_gradients(model, batch)
    trainers.backward(model, batch)
    for name, gradient in read_gradients(model).items():
        torch.testing.assert_close(found[name], gradient, msg=name, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize(
    "name",
    [
        "plain",
        pytest.param("fsdp", marks=pytest.mark.slow),
        pytest.param("megatron", marks=pytest.mark.clients),
    ],
)
def test_replay_has_the_gradients_of_a_run_without_it(
    name: str, folder: Path, plain: Trained
) -> None:
    trained = plain
    if name != "plain":
        if not PROGRAMS[name].exists():
            pytest.skip(f"{PROGRAMS[name]} is not there: make client-venvs")
        run_trainer(name, folder)
        trained = trainers.read(folder, name)
    assert trained.gradients < MAX_GRADIENTS
    # Routes that it would not select change its gradients.
    assert trained.own_gradients > 0.1
    assert trained.own_gradients == pytest.approx(plain.own_gradients, rel=1e-4)
    assert trained.replayed.mean < 0.7 * trained.plain.mean
    assert trained.plain.mean == pytest.approx(plain.plain.mean, rel=0.1)
    assert [d.shape for d in trained.plain.differs] == [d.shape for d in plain.plain.differs]
    for found, wanted in zip(trained.replayed.delta, plain.replayed.delta, strict=True):
        np.testing.assert_allclose(found, wanted, atol=0.1)
