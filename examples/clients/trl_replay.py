# SPDX-License-Identifier: Apache-2.0
"""Route replay in TRL's `GRPOTrainer` (tried with 1.16.0, whose code stays as it is):

    trainer = ReplayTrainer(
        model, reward, args=config, train_dataset=dataset, processing_class=tokenizer,
        url="http://127.0.0.1:8000", weights="/dev/shm/weights",
    )
    trainer.train()

The rollouts come from `VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --enable-return-routed-experts
--logprobs-mode processed_logprobs`. Before each rollout with new weights, the trainer writes them
into the folder `weights`, and the server reads them from there: both must see this folder. With
`weights_dtype`, they are written in this type, for example the server's.

With `use_vllm=True` and `vllm_mode="server"` in `config`, TRL sends the weights itself, through
NCCL, and `weights` is not used.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from trl import GRPOTrainer

from examples.client import Completion, generate
from examples.replay import OWN, place_routes, replay

REQUESTS = 64  # sent at once by each process


class ReplayTrainer(GRPOTrainer):
    """A `GRPOTrainer` whose model takes the experts that the server took, in all its passes over
    sampled tokens: log-probs, loss and gradients. It is for text, without tools and adapters.

    TRL logs `routing/own_choice_differs`: the share of decisions, a token in an MoE layer, in which
    the model itself would take another set of experts.

    Attributes:
        replays: whether the model takes them; if not, it selects as usual.
        completions: what the server sampled for the latest rollout of this process.
    """

    replays = True
    use_vllm: bool
    vllm_generation: Any

    def __init__(
        self,
        *args: Any,
        url: str,
        weights: Path | str | None = None,
        weights_dtype: torch.dtype | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.url = url
        self.completions: list[Completion] = []
        self._routes: torch.Tensor | None = None  # of the batch whose loss is computed
        self._until_backward = contextlib.ExitStack()
        if not self.use_vllm:
            if weights is None:
                raise ValueError("weights must name a folder, if TRL does not send them itself")
            self.use_vllm = True
            self.vllm_mode = "server"
            self._last_loaded_step = -1
            self.vllm_generation = ByReload(self, url, Path(weights), weights_dtype)
        check_nccl(self.vllm_generation)
        self.vllm_generation.generate = self._roll_out

    def sampling_params(self, index: int) -> dict[str, Any]:
        """Fields of vLLM's `SamplingParams` for one sample of a rollout of this process."""
        names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
        given = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        extra = self.args.generation_kwargs or {}
        return {**given, "max_tokens": self.max_completion_length, "logprobs": 0, **extra}

    def _ask(self, prompt: Sequence[int], index: int) -> Completion:
        return generate(self.url, prompt, self.sampling_params(index))[0]

    def _roll_out(self, prompts: Sequence[Sequence[int]], *_: Any, **__: Any) -> tuple[Any, ...]:
        """What TRL calls for its samples: `VLLMGeneration.generate`."""
        with ThreadPoolExecutor(min(REQUESTS, len(prompts))) as senders:
            self.completions = list(senders.map(self._ask, prompts, range(len(prompts))))
        logprobs = [[[logprob] for logprob in c.logprobs] for c in self.completions]
        return prompts, [list(c.token_ids) for c in self.completions], logprobs, None

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        self._routes = None
        output = super()._generate_and_score_completions(inputs)
        # TRL shuffles and splits them with the tokens.
        names = ("ids", "mask")
        ids, mask = (
            torch.cat([output[f"prompt_{n}"], output[f"completion_{n}"]], dim=1) for n in names
        )
        output["routes"] = place_routes(self.completions, ids, mask)
        return output

    def _compute_loss(self, model: Any, inputs: Mapping[str, Any]) -> torch.Tensor:
        self._routes = inputs["routes"]
        return super()._compute_loss(model, inputs)

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        with self._until_backward:
            return super().training_step(*args, **kwargs)

    def _get_per_token_logps_and_entropies(
        self,
        model: Any,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        logits_to_keep: int,
        batch_size: int | None = None,
        **kwargs: Any,
    ) -> tuple[Any, ...]:
        passes = super()._get_per_token_logps_and_entropies
        bare = self.accelerator.unwrap_model(model)
        if bare is not self.accelerator.unwrap_model(
            self.model
        ):  # a reference model selects itself
            return passes(model, input_ids, attention_mask, logits_to_keep, batch_size, **kwargs)
        routes, parts = self._routes, []
        if routes is None:
            routes = place_routes(self.completions, input_ids, attention_mask)
        for part in torch.arange(len(input_ids)).split(batch_size or len(input_ids)):
            given = routes[part] if self.replays else torch.full_like(routes[part], OWN)
            replaying = replay(bare, given, self.completions[0].moe_layers)
            # With gradient checkpointing, the backward pass computes layers again.
            training = torch.is_grad_enabled()
            with contextlib.ExitStack() as here:
                own = (self._until_backward if training else here).enter_context(replaying)
                tensors = (input_ids[part], attention_mask[part])
                parts.append(passes(model, *tensors, logits_to_keep, **kwargs))
            if not training:
                self._log_own_choice(routes[part], own)
        logprobs, entropies, losses = zip(*parts, strict=True)
        return (
            torch.cat(logprobs),
            None if entropies[0] is None else torch.cat(entropies),
            None if losses[0] is None else torch.stack(losses).mean(),
        )

    def _log_own_choice(self, routes: torch.Tensor, own: Mapping[int, torch.Tensor]) -> None:
        known = (routes[:, :, 0, 0] != OWN).flatten()
        differs = [
            (ids.sort().values != routes[:, :, layer, : ids.shape[1]].flatten(0, 1).sort().values)
            for layer, ids in own.items()
        ]
        mode = "train" if self.model.training else "eval"
        for each in differs:
            share = each.any(dim=-1)[known].float().mean().item()
            self._metrics[mode]["routing/own_choice_differs"].append(share)


def check_nccl(vllm_generation: Any) -> None:
    """Raises RuntimeError if vLLM did not load NCCL. vLLM's release reports no error then: it sends
    nothing, and the server computes with undefined weights."""
    client = getattr(vllm_generation, "vllm_client", None)
    if client is not None and client.communicator.disabled:
        raise RuntimeError(
            "vLLM could not load NCCL, so no weights would reach the server: install the NCCL that "
            "this vLLM requires (v0.33.0: 2.29.7 or later), for the trainer and the server"
        )


class ByReload:
    """Sends weights through a folder: the server reloads them. Stands in for `VLLMGeneration`."""

    mode = "server"
    generate: Callable[..., Any]

    def __init__(
        self, trainer: GRPOTrainer, url: str, folder: Path, dtype: torch.dtype | None
    ) -> None:
        self.trainer = trainer
        self.url = url
        self.folder = folder
        self.dtype = dtype

    def sync_weights(self) -> None:
        """What TRL calls before a rollout with new weights."""
        accelerator, model = self.trainer.accelerator, self.trainer.model_wrapped
        state = accelerator.get_state_dict(model)
        if accelerator.is_main_process:
            state = {name: weight.to(self.dtype or weight.dtype) for name, weight in state.items()}
            shutil.rmtree(self.folder, ignore_errors=True)
            accelerator.unwrap_model(model).save_pretrained(self.folder, state_dict=state)
            # Cached KV, and its rows, are those of the weights before. A prompt that hits the cache
            # would be continued from them.
            self._post("/pause?mode=abort&clear_cache=true")
            reload = {"weights_path": str(self.folder.resolve())}
            self._post("/collective_rpc", {"method": "reload_weights", "kwargs": reload})
            self._post("/resume")
        accelerator.wait_for_everyone()

    def _post(self, path: str, body: Mapping[str, Any] | None = None) -> None:
        data, kind = json.dumps(body or {}).encode(), {"Content-Type": "application/json"}
        request = urllib.request.Request(self.url + path, data, kind)
        try:
            _direct.open(request, timeout=600).read()
        except urllib.error.HTTPError as e:
            why = (
                "start the server with VLLM_SERVER_DEV_MODE=1" if e.code == 404 else e.read()[:500]
            )
            raise RuntimeError(f"the server answered {path} with {e.code}: {why!s}") from e


# The server is in the same network: ignore a proxy of the environment.
_direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
