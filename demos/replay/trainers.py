# SPDX-License-Identifier: Apache-2.0
"""What one trainer shows: how far its log-probs are from the server's, and whether the gradients of
its replay are those of a run without replay that takes equal routes.

Each trainer but the plain one is a program, `demos.replay.with_<name>`, perhaps of another
environment. It gets a folder with `checkpoint/`, `completions.pickle` and `wanted.pt`, and writes
`<name>.pickle`.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from demos.replay import mismatch
from demos.replay.mismatch import BATCH, Gain, Gradients, Mismatch, Replaying
from examples.client import Completion
from examples.replay import OWN, pad_routes

CHECKPOINT = "checkpoint"
WHOLE = slice(None)


@dataclass(frozen=True)
class Trained:
    """One trainer.

    Attributes:
        name: with its version.
        plain, replayed: in bfloat16, with its own routes and the server's.
        own_gradients, gradients: in float32, the relative distance of its gradients from those of
            `wanted_gradients`, with its own routes and with replay of the wanted ones.
    """

    name: str
    plain: Mismatch
    replayed: Mismatch
    own_gradients: float
    gradients: float

    @cached_property
    def gain(self) -> Gain:
        """How many times nearer `replayed` is."""
        return mismatch.nearer(self.plain, self.replayed)


def load(checkpoint: Path, dtype: torch.dtype) -> Any:
    """The Hugging Face model."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    return transformers.AutoModelForCausalLM.from_pretrained(
        checkpoint, dtype=dtype, local_files_only=True
    ).eval()


def train(
    name: str,
    load: Callable[[Path, torch.dtype], Any],
    folder: Path,
    replaying: Replaying = mismatch.in_transformers,
    read_gradients: Callable[[Any], Gradients] = mismatch.read_gradients,
    part: slice = WHOLE,
) -> Trained:
    """Measure a trainer.

    Args:
        name: of the trainer.
        load: makes its model of a checkpoint, in the dtype that it computes in.
        folder: see the module.
        replaying: its replay.
        read_gradients: reads its gradients after a backward pass.
        part: of the completions, those of this process.
    """
    completions = read(folder, "completions")
    model = load(folder / CHECKPOINT, torch.bfloat16)
    plain, replayed = (
        mismatch.measure(model, completions[part], replayed=r, replaying=replaying)
        for r in (False, True)
    )
    wanted = torch.load(folder / "wanted.pt")
    model = load(folder / CHECKPOINT, torch.float32)
    batch = other_routes(completions)[part]
    own_gradients, gradients = (
        _distance(_gradients(model, batch, replaying, r, read_gradients), wanted)
        for r in (False, True)
    )
    return Trained(name, plain, replayed, own_gradients, gradients)


def other_routes(completions: Sequence[Completion]) -> list[Completion]:
    """A batch with routes that the model would not select: each completion's own rows, from the
    last to the first."""
    return [replace(c, rows=c.rows[::-1].copy()) for c in completions[:BATCH]]


def wanted_gradients(model: Any, batch: Sequence[Completion]) -> Gradients:
    """Gradients of given routes without replay: the routers' logits of all other experts are minus
    infinity. The experts' weights are those of a replay where a model normalises them over the
    selected experts.

    Args:
        model: a Hugging Face model, in float32.
        batch: completions with the routes that the model takes.
    """
    routes = pad_routes(batch, mismatch.pad(batch).shape[1]).flatten(0, 1)
    handles = []
    for layer in batch[0].moe_layers:
        given = routes[:, layer]
        left_out = torch.ones(len(given), model.config.num_experts, dtype=torch.bool)
        left_out.scatter_(1, given.clamp(min=0), False)
        left_out[given[:, 0] == OWN] = False
        handles.append(
            model.model.layers[layer].mlp.gate.register_forward_hook(
                lambda module, inputs, logits, mask=left_out: logits.masked_fill(mask, -torch.inf)
            )
        )
    backward(model, batch)
    for handle in handles:
        handle.remove()
    found = mismatch.read_gradients(model)
    model.zero_grad()
    return found


def _gradients(
    model: Any,
    batch: Sequence[Completion],
    replaying: Replaying,
    replayed: bool,
    read_gradients: Callable[[Any], Gradients],
) -> Gradients:
    model.zero_grad()
    with replaying(model, batch, mismatch.pad(batch).shape[1], replayed):
        backward(model, batch)
    return read_gradients(model)


def backward(model: Any, batch: Sequence[Completion]) -> None:
    """Compute gradients of the mean log-prob of the sampled tokens."""
    tokens = mismatch.pad(batch)
    logprobs = model(tokens, use_cache=False).logits.float().log_softmax(dim=-1)
    torch.cat(mismatch.sampled(logprobs, batch, tokens)).mean().backward()


def _distance(found: Gradients, wanted: Gradients) -> float:
    if found.keys() != wanted.keys():
        raise ValueError(f"gradients of {sorted(found.keys() ^ wanted.keys())[0]} are missing")
    squares = sum((found[name] - wanted[name]).square().sum().item() for name in wanted)
    return float((squares / sum(g.square().sum().item() for g in wanted.values())) ** 0.5)


def prepare(folder: Path, model: Any, completions: Sequence[Completion]) -> None:
    """Write what trainers get, beside the checkpoint.

    Args:
        folder: see the module.
        model: a Hugging Face model in float32.
        completions: that the server sampled.
    """
    write(folder, "completions", completions)
    torch.save(wanted_gradients(model, other_routes(completions)), folder / "wanted.pt")


def read(folder: Path, name: str) -> Any:
    """What `write` wrote there."""
    return pickle.loads((folder / f"{name}.pickle").read_bytes())


def write(folder: Path, name: str, result: Any) -> None:
    (folder / f"{name}.pickle").write_bytes(pickle.dumps(result))
