# SPDX-License-Identifier: Apache-2.0
"""A trainer that shards the Hugging Face model with FSDP2, over two processes on a CPU (gloo):

python -m demos.replay.with_fsdp FOLDER
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from demos.replay import trainers
from demos.replay.mismatch import Mismatch

PROCESSES = 2


def load(checkpoint: Path, dtype: torch.dtype) -> Any:
    """Parameters in float32, computed in `dtype`, as trainers do."""
    model = trainers.load(checkpoint, torch.float32)
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    mesh = dist.device_mesh.init_device_mesh("cpu", (PROCESSES,))
    for layer in model.model.layers:
        layer.mlp.register_forward_hook(use_all_experts)
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    return fully_shard(model, mesh=mesh, mp_policy=policy)


def use_all_experts(block: Any, inputs: Any, output: Any) -> Any:
    """Give experts that no token of this process takes a gradient of zero: FSDP2 adds gradients
    of parameters that have one in every process."""
    hidden, logits = output
    return hidden + 0 * sum(p.sum() for p in block.experts.parameters()), logits


def train(rank: int, folder: Path, meeting: str) -> None:
    """One of the processes: every other completion."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=PROCESSES)
    name = f"FSDP2 of torch {torch.__version__.partition('+')[0]}, {PROCESSES} processes"
    mine = trainers.train(name, load, folder, part=slice(rank, None, PROCESSES))
    parts: list[Any] = [None] * PROCESSES
    dist.all_gather_object(parts, mine)
    if rank == 0:
        whole = replace(
            mine,
            plain=interleave([part.plain for part in parts]),
            replayed=interleave([part.replayed for part in parts]),
        )
        trainers.write(folder, "fsdp", whole)
    dist.destroy_process_group()


def interleave(parts: list[Mismatch]) -> Mismatch:
    """The whole of which each process had every other completion."""
    return Mismatch(
        [d for group in zip(*(p.delta for p in parts), strict=True) for d in group],
        [d for group in zip(*(p.differs for p in parts), strict=True) for d in group],
    )


def main(folder: Path) -> None:
    """Measure one trainer; see `trainers`."""
    meeting = folder / "meeting"
    meeting.unlink(missing_ok=True)
    torch.multiprocessing.spawn(train, (folder, meeting.resolve().as_uri()), nprocs=PROCESSES)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
