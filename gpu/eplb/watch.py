# SPDX-License-Identifier: Apache-2.0
"""A worker extension that counts what asynchronous EPLB does, and kills its thread.

LLM(..., enable_eplb=True, worker_extension_cls="gpu.eplb.watch.Watch")
llm.collective_rpc("watch_eplb")
"""

from __future__ import annotations

import contextlib
import ctypes
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import torch


class Watch:
    """Mixed into vLLM's worker."""

    model_runner: Any

    def watch_eplb(self) -> None:
        """Count from now on."""
        from vllm.distributed.eplb import eplb_state

        counts = self.eplb_counts = {"rearrangements": 0, "moved_layers": 0, "moved_experts": 0}
        rearrange, move = eplb_state.EplbState.rearrange, eplb_state._move_to_workspace

        def counted_rearrange(state: Any, *args: Any, **kw: Any) -> Any:
            counts["rearrangements"] += 1
            return rearrange(state, *args, **kw)

        def counted_move(model_state: Any, ep_rank: int) -> None:
            before = model_state.physical_to_logical_map.clone()
            move(model_state, ep_rank)
            counts["moved_layers"] += 1
            moved = before != model_state.physical_to_logical_map
            counts["moved_experts"] += int(moved.sum())

        eplb_state.EplbState.rearrange = counted_rearrange
        eplb_state._move_to_workspace = counted_move

    def eplb_found(self) -> dict[str, Any]:
        """The counts, the expert map, and the state of the worker thread."""
        state = self.model_runner.eplb_state
        (model_state,) = state.model_states.values()
        return {
            **self.eplb_counts,
            "layers": model_state.model.num_moe_layers,
            "map": model_state.physical_to_logical_map.tolist(),
            "worker_alive": state.async_worker.is_alive(),
            "worker_error": repr(state.async_worker.error),
        }

    def kill_eplb_thread(self) -> None:
        """Kill the worker thread: it ends as soon as it runs again."""
        worker = self.model_runner.eplb_state.async_worker
        ctypes.pythonapi.PyThreadState_SetAsyncExc(
            ctypes.c_ulong(worker.ident), ctypes.py_object(SystemExit)
        )

    def stand_in_eplb(self, config: dict[str, Any], num_experts: int, num_layers: int) -> None:
        """Run vLLM's EPLB on a CPU, on weights that the model does not use, with random loads.
        Streams and events are done at once."""
        from vllm.config.parallel import EPLBConfig
        from vllm.distributed import parallel_state
        from vllm.distributed.eplb.eplb_state import EplbState

        # Nothing has to wait for them.
        torch.cuda.Stream = torch.cuda.Event = MagicMock
        torch.cuda.stream = lambda stream: contextlib.nullcontext()
        torch.accelerator.set_device_index = lambda index: None
        ep = parallel_state.get_ep_group()
        parallel_state._EPLB = parallel_state.init_model_parallel_group(
            [ep.ranks], ep.local_rank, "gloo", group_name="eplb"
        )
        settings = EPLBConfig(**config)
        experts = num_experts + settings.num_redundant_experts
        model = SimpleNamespace(
            num_moe_layers=num_layers,
            num_routed_experts=num_experts,
            num_logical_experts=num_experts,
            num_redundant_experts=settings.num_redundant_experts,
            num_physical_experts=experts,
            num_expert_groups=1,
            moe_layers=[],
            expert_weights=[[torch.zeros(experts // ep.world_size, 8)] for _ in range(num_layers)],
            set_eplb_state=lambda *args: None,
        )
        parallel_config: Any = SimpleNamespace(eplb_config=settings)
        state = EplbState(parallel_config, torch.device("cpu"))
        state.cuda_device_index = 0
        model_config: Any = SimpleNamespace(model="stand-in", compute_hash=lambda: "stand-in")
        state.add_model(model, model_config)
        loads = torch.Generator().manual_seed(ep.rank_in_group)

        def step(is_dummy: bool = False, is_profile: bool = False) -> None:
            (model_state,) = state.model_states.values()
            load = model_state.expert_load_pass
            load.copy_(torch.randint(1000, load.shape, generator=loads))
            state.step(is_dummy=is_dummy)

        self.model_runner.eplb_state = state
        self.model_runner.eplb_step = step
        state.start_async_loop()
