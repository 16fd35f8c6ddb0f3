# SPDX-License-Identifier: Apache-2.0
"""A worker extension that records, on each rank, the router logits of every forward pass.

    LLM(..., enforce_eager=True, worker_extension_cls="harness.recorder.Recorder")
    llm.collective_rpc("record_start")
    ...
    logits = take(llm)  # for one rank and one request at a time
    llm.collective_rpc("record_flush", args=("/folder/prefix",))  # for any number

With `record_flush` a rank writes `<prefix>-dp<d>-pp<p>-tp<t>.npz`. Its `meta` is JSON: the ranks,
and for each step the requests' first tokens and where each request's tokens begin. The other arrays
are `<step>/positions` (T,) and `<step>/<layer>` (R, experts) float32: R is T, padding included, or
with sequence parallel MoE this rank's chunk. Nothing waits for the device before it is read.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

if TYPE_CHECKING:
    from vllm import LLM

# (T, E) router logits by decoder layer.
Logits = dict[int, npt.NDArray[np.float32]]

# Of a decoder layer's gate in vLLM's modules.
GATE = re.compile(r"(?:^|\.)layers\.(\d+)\.mlp\.(?:gate|router)$")


class Recorder:
    """Mixed into vLLM's worker."""

    model_runner: Any

    def record_start(self) -> int:
        """Start recording. Returns the number of routers of this rank."""
        runner = self.model_runner
        model = runner.get_model()
        steps: list[dict[str, Any]] = []
        self.recorded_steps = steps
        state = {"dummy": False}
        dummy_run = runner._dummy_run

        def quiet_dummy_run(*args: Any, **kwargs: Any) -> Any:
            state["dummy"] = True
            try:
                return dummy_run(*args, **kwargs)
            finally:
                state["dummy"] = False

        read_batch = self._batch_reader()

        def see_batch(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
            if state["dummy"]:
                return
            first, starts = read_batch()
            steps.append(
                {
                    "first": first,
                    "starts": starts,
                    "positions": kwargs["positions"].clone(),
                    "logits": {},
                }
            )

        def see_logits(layer: int, module: Any, args: Any, output: Any) -> None:
            if not state["dummy"]:
                logits = output[0] if isinstance(output, tuple) else output
                steps[-1]["logits"][layer] = logits.detach().float().clone()

        runner._dummy_run = quiet_dummy_run
        model.register_forward_pre_hook(see_batch, with_kwargs=True)
        routers = 0
        for name, module in model.named_modules():
            if match := GATE.search(name):
                module.register_forward_hook(functools.partial(see_logits, int(match[1])))
                routers += 1
        self.physical_experts = self._physical_experts()
        return routers

    def record_flush(self, prefix: str) -> bool:
        """Write the record. Returns whether EPLB has moved experts since the start."""
        from vllm.distributed import get_dp_group, get_pp_group, get_tp_group

        ranks = {
            "dp": get_dp_group().rank_in_group,
            "pp": get_pp_group().rank_in_group,
            "tp": get_tp_group().rank_in_group,
        }
        moved = self.physical_experts != self._physical_experts()
        steps = self.recorded_steps
        meta = {
            "ranks": ranks,
            "moved": moved,
            "steps": [{k: s[k] for k in ("first", "starts")} for s in steps],
        }
        arrays: dict[str, Any] = {"meta": np.array(json.dumps(meta))}
        for number, step in enumerate(steps):
            arrays[f"{number}/positions"] = step["positions"].cpu().numpy()
            for layer, logits in step["logits"].items():
                arrays[f"{number}/{layer}"] = logits.cpu().numpy()
        np.savez(f"{prefix}-" + "-".join(f"{k}{v}" for k, v in ranks.items()), **arrays)
        return moved

    def record_take(self) -> list[tuple[Any, dict[int, Any]]]:
        """Positions and logits of each step since the start or the last call."""
        taken = [
            (
                step["positions"].cpu().numpy(),
                {k: v.cpu().numpy() for k, v in step["logits"].items()},
            )
            for step in self.recorded_steps
        ]
        self.recorded_steps.clear()
        return taken

    def spread_routers(self, std: float) -> None:
        """Give the routers random weights, equal on all ranks. Dummy weights route every token
        alike."""
        for name, module in self.model_runner.get_model().named_modules():
            if match := GATE.search(name):
                generator = torch.Generator().manual_seed(int(match[1]))
                shape = module.output_size, module.input_size
                random = torch.randn(shape, generator=generator) * std
                if hasattr(module, "cpu_linear"):
                    # The CPU's kernel has a reordered copy; the weight itself may be gone.
                    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

                    weight = random.to(module.weight.dtype)
                    module.weight = torch.nn.Parameter(weight, requires_grad=False)
                    dispatch_cpu_unquantized_gemm(module, remove_weight=False)
                else:
                    module.weight.data.copy_(random)

    def _batch_reader(self) -> Callable[[], tuple[list[int], list[int]]]:
        """A function that gives, during a forward pass, the first token of each of its requests and
        where each request's tokens begin, and the end of the last one's."""
        runner = self.model_runner
        if hasattr(runner, "input_batch"):

            def read() -> tuple[list[int], list[int]]:
                req_ids = list(runner.input_batch.req_ids)
                first = [runner.requests[r].prompt_token_ids[0] for r in req_ids]
                return first, runner.query_start_loc.np[: len(req_ids) + 1].tolist()

            return read
        # Model Runner V2 keeps neither the batch nor the prompts on the host.
        first_tokens: dict[str, int] = {}
        batch: Any = None
        add_request, prepare_inputs = runner.req_states.add_request, runner.prepare_inputs

        def see_request(**request: Any) -> Any:
            first_tokens[request["req_id"]] = request["all_token_ids"][0]
            return add_request(**request)

        def see_inputs(*args: Any, **kwargs: Any) -> Any:
            nonlocal batch
            batch = prepare_inputs(*args, **kwargs)
            return batch

        def read_v2() -> tuple[list[int], list[int]]:
            starts = batch.query_start_loc_np[: len(batch.req_ids) + 1].tolist()
            return [first_tokens[r] for r in batch.req_ids], starts

        runner.req_states.add_request, runner.prepare_inputs = see_request, see_inputs
        return read_v2

    def _physical_experts(self) -> list[Any]:
        state = getattr(self.model_runner, "eplb_state", None)
        if state is None:
            return []
        return [
            model.physical_to_logical_map.cpu().tolist() for model in state.model_states.values()
        ]


def take(llm: LLM) -> Logits:
    """(T, E) logits by decoder layer, of positions 0 to T - 1, since the start or the last call."""
    (steps,) = llm.collective_rpc("record_take")
    by_layer: dict[int, dict[int, npt.NDArray[np.float32]]] = {}
    for positions, logits in steps:
        for layer, rows in logits.items():
            assert len(positions) == len(rows)
            by_layer.setdefault(layer, {}).update(zip(positions.tolist(), rows, strict=True))
    for seen in by_layer.values():
        assert sorted(seen) == list(range(len(seen)))
    return {
        layer: np.stack([seen[p] for p in range(len(seen))])
        for layer, seen in sorted(by_layer.items())
    }
