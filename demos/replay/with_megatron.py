# SPDX-License-Identifier: Apache-2.0
"""megatron-core's MoE layers in a trainer, in an environment of their own:

    build/clients/megatron-core/bin/python -m demos.replay.with_megatron FOLDER

Its `MoELayer` with `TopKRouter`, `RouterReplay`, token dispatcher and experts takes the place of
each MoE layer of the Hugging Face model, with the same weights; attention, embeddings and the last
layer stay those of `transformers`, because megatron-core's want a GPU.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction
from megatron.core.transformer.transformer_config import TransformerConfig

from demos.replay import trainers
from demos.replay.mismatch import Gradients
from examples.client import Completion
from examples.clients.megatron_replay import router_targets


class MegatronBlock(torch.nn.Module):
    """megatron-core's `MoELayer`, with the weights of a Qwen3-MoE block and called as one."""

    def __init__(self, block: Any, config: Any, dtype: torch.dtype) -> None:
        super().__init__()
        settings = TransformerConfig(
            num_layers=1,
            hidden_size=config.hidden_size,
            num_attention_heads=config.num_attention_heads,
            ffn_hidden_size=config.moe_intermediate_size,
            moe_ffn_hidden_size=config.moe_intermediate_size,
            num_moe_experts=config.num_experts,
            moe_router_topk=config.num_experts_per_tok,
            moe_router_load_balancing_type="none",
            moe_token_dispatcher_type="allgather",
            moe_enable_routing_replay=True,
            gated_linear_unit=True,
            activation_func=F.silu,
            add_bias_linear=False,
            bias_activation_fusion=False,
            gradient_accumulation_fusion=False,
            use_cpu_initialization=True,
            params_dtype=dtype,
        )
        spec = get_moe_module_spec(use_te=False, num_experts=config.num_experts)
        self.moe = MoELayer(settings, spec.submodules, layer_number=1)
        # `TopKRouter.gating`, a linear layer, works on a GPU alone.
        self.moe.router.gating = self._gating
        self.logits: torch.Tensor | None = None
        self.top_k = config.num_experts_per_tok
        with torch.no_grad():
            self.moe.router.weight.copy_(block.gate.weight)
            for mine, expert in zip(self.moe.experts.local_experts, block.experts, strict=True):
                gate_and_up = (expert.gate_proj.weight, expert.up_proj.weight)
                mine.linear_fc1.weight.copy_(torch.cat(gate_and_up))
                mine.linear_fc2.weight.copy_(expert.down_proj.weight)

    def _gating(self, hidden: torch.Tensor) -> torch.Tensor:
        logits = F.linear(hidden, self.moe.router.weight)
        self.logits = logits.detach().flatten(0, 1)
        return logits

    def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(B, T, H) as B * T tokens of one sequence, which megatron-core wants first."""
        output, _ = self.moe(hidden.reshape(-1, 1, hidden.shape[-1]))
        return output.view_as(hidden), self.logits

    def own(self) -> torch.Tensor:
        """(B * T, k): the experts that the router itself would take in the latest pass."""
        assert self.logits is not None
        return self.logits.topk(self.top_k).indices

    def gradients(self) -> Iterator[tuple[str, torch.Tensor]]:
        """By the names of the Qwen3-MoE block."""
        yield "gate.weight", self.moe.router.weight.grad
        for i, expert in enumerate(self.moe.experts.local_experts):
            gate, up = expert.linear_fc1.weight.grad.chunk(2)
            yield f"experts.{i}.gate_proj.weight", gate
            yield f"experts.{i}.up_proj.weight", up
            yield f"experts.{i}.down_proj.weight", expert.linear_fc2.weight.grad


def load(checkpoint: Path, dtype: torch.dtype) -> Any:
    model = trainers.load(checkpoint, dtype)
    RouterReplay.clear_global_router_replay_instances()
    for layer in model.model.layers:
        layer.mlp = MegatronBlock(layer.mlp, model.config, dtype)
    return model.eval()


@contextmanager
def replaying(
    model: Any, batch: Sequence[Completion], length: int, replayed: bool
) -> Iterator[dict[int, torch.Tensor]]:
    """`mismatch.Replaying` by `RouterReplay`."""
    own: dict[int, torch.Tensor] = {}
    if replayed:
        targets = [router_targets(completion, length) for completion in batch]
        RouterReplay.set_replay_data([torch.cat(layer) for layer in zip(*targets, strict=True)])
        RouterReplay.set_global_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
    handle = model.register_forward_hook(
        lambda *_: own.update((m, model.model.layers[m].mlp.own()) for m in batch[0].moe_layers)
    )
    try:
        yield own
    finally:
        handle.remove()
        RouterReplay.clear_global_router_replay_action()
        RouterReplay.clear_global_indices()


def gradients(model: Any) -> Gradients:
    """`mismatch.Gradients` by the names of the Hugging Face model."""
    found = {name: p.grad for name, p in model.named_parameters() if ".mlp." not in name}
    for index, layer in enumerate(model.model.layers):
        for name, gradient in layer.mlp.gradients():
            found[f"model.layers.{index}.mlp.{name}"] = gradient
    return found


def main(folder: Path) -> None:
    """Measure one trainer; see `trainers`."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    torch.manual_seed(0)
    name = f"MoE layers of megatron-core {version('megatron-core')}"
    trainers.write(folder, "megatron", trainers.train(name, load, folder, replaying, gradients))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
