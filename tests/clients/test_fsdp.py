# SPDX-License-Identifier: Apache-2.0
"""Route replay in a trainer that shards its model with FSDP2, over two processes on a CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from torch.distributed.fsdp import fully_shard

from examples.replay import OWN, replay
from harness import oracle
from harness.checkpoint import make_checkpoint

# Each process trains one of these sequences.
PROCESSES, LENGTH = 2, 96
# So small that each process selects all experts: where one process has no gradient of an expert,
# FSDP2 cannot add gradients, with or without replay.
LAYERS, EXPERTS, TOP_K = 2, 8, 4

Gradients = dict[str, torch.Tensor]

pytestmark = pytest.mark.slow


def load(checkpoint: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(
        checkpoint, dtype=torch.float32, attn_implementation="eager", local_files_only=True
    ).train()


def make_tokens() -> torch.Tensor:
    return torch.randint(4, 700, (PROCESSES, LENGTH), generator=torch.Generator().manual_seed(1))


def backward(model: Any, tokens: torch.Tensor, routes: torch.Tensor | None) -> Gradients:
    """Gradients of the mean loss, whole."""
    if routes is None:
        model(tokens, labels=tokens, use_cache=False).loss.backward()
    else:
        with replay(model, routes, range(LAYERS)):
            model(tokens, labels=tokens, use_cache=False).loss.backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {
        name: grad.full_tensor() if hasattr(grad, "full_tensor") else grad
        for name, grad in grads.items()
    }


def train_sharded(rank: int, checkpoint: Path, routes: torch.Tensor | None, folder: Path) -> None:
    """One of the processes."""
    dist.init_process_group(
        "gloo", init_method=f"file://{folder / 'meet'}", rank=rank, world_size=PROCESSES
    )
    mesh = dist.device_mesh.init_device_mesh("cpu", (PROCESSES,))
    model = load(checkpoint)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    mine = slice(rank, rank + 1)
    gradients = backward(model, make_tokens()[mine], None if routes is None else routes[mine])
    if rank == 0:
        torch.save(gradients, folder / "gradients.pt")
    dist.destroy_process_group()


def sharded(checkpoint: Path, routes: torch.Tensor | None, folder: Path) -> Gradients:
    folder.mkdir()
    torch.multiprocessing.spawn(
        train_sharded, (checkpoint, routes, folder), nprocs=PROCESSES, join=True
    )
    gradients: Gradients = torch.load(folder / "gradients.pt")
    return gradients


def assert_same(given: Gradients, wanted: Gradients) -> None:
    assert given.keys() == wanted.keys()
    assert wanted["model.layers.1.mlp.gate.weight"].abs().max() > 1e-4
    for name, gradient in wanted.items():
        torch.testing.assert_close(given[name], gradient, msg=name, rtol=1e-4, atol=1e-6)


def own_routes(checkpoint: Path) -> torch.Tensor:
    """What the model selects itself, by the oracle; the last token is left to the model."""
    routes = torch.full((PROCESSES, LENGTH, LAYERS, TOP_K), OWN)
    for sequence, tokens in enumerate(make_tokens()):
        ids = oracle.route(checkpoint, tokens.tolist()).ids
        routes[sequence, :-1] = torch.from_numpy(ids).transpose(0, 1)[:-1]
    return routes


def other_routes() -> torch.Tensor:
    """Experts that the model would not select."""
    generator = torch.Generator().manual_seed(2)
    scores = torch.rand(PROCESSES, LENGTH, LAYERS, EXPERTS, generator=generator)
    return scores.topk(TOP_K).indices


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fsdp") / "model"
    return make_checkpoint(folder, num_hidden_layers=LAYERS, num_experts=EXPERTS)


def test_gradients_of_a_sharded_model_are_those_of_a_whole_one(
    checkpoint: Path, tmp_path: Path
) -> None:
    whole = backward(load(checkpoint), make_tokens(), other_routes())
    assert_same(sharded(checkpoint, other_routes(), tmp_path / "replayed"), whole)


def test_own_routes_replayed_in_a_sharded_model_change_no_gradient(
    checkpoint: Path, tmp_path: Path
) -> None:
    plain = sharded(checkpoint, None, tmp_path / "plain")
    assert_same(sharded(checkpoint, own_routes(checkpoint), tmp_path / "replayed"), plain)
