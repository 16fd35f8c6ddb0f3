# SPDX-License-Identifier: Apache-2.0
"""A naive model of what the workers do, for the real scheduler to be driven with.

It has no KV cache and no batch: `sequence.py` says what its tokens and rows are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import ModelRunnerOutput, RoutedExpertsLists
from vllm.v1.routed_experts_params import get_routed_experts_start

from tests.property.sequence import next_token, propose, true_row

MOE_LAYERS = (0, 1)


@dataclass
class Worker:
    """Keeps the tokens of every request, as a model runner does, and runs steps."""

    weights: int = 0
    tokens: dict[str, list[int]] = field(default_factory=dict)
    num_prompt_tokens: dict[str, int] = field(default_factory=dict)
    asking: set[str] = field(default_factory=set)
    # The worker makes the drafts itself, of which the scheduler knows the number only.
    proposes: bool = False
    draft_is_right: Sequence[bool] = ()
    # How many tokens of each request were processed, less rejected drafts.
    num_done: dict[str, int] = field(default_factory=dict)

    def execute(self, scheduled: SchedulerOutput) -> ModelRunnerOutput:
        """Process the scheduled tokens; sample where the last known one is among them."""
        first_positions: dict[str, int] = {}
        for new in scheduled.scheduled_new_reqs:
            assert new.prompt_token_ids is not None
            self.tokens[new.req_id] = list(new.prompt_token_ids)
            self.num_prompt_tokens[new.req_id] = len(new.prompt_token_ids)
            if get_routed_experts_start(new.sampling_params) is not None:
                self.asking.add(new.req_id)
            first_positions[new.req_id] = new.num_computed_tokens
        cached = scheduled.scheduled_cached_reqs
        for req_id, position, num_output_tokens in zip(
            cached.req_ids, cached.num_computed_tokens, cached.num_output_tokens, strict=True
        ):
            # The scheduler threw away what was sampled from KV that was not loaded.
            del self.tokens[req_id][self.num_prompt_tokens[req_id] + num_output_tokens :]
            if req_id in cached.resumed_req_ids:
                self.tokens[req_id] = list(cached.all_token_ids[req_id])
            elif self.proposes:
                # The scheduler counts drafts of a step on its way as accepted.
                position = min(position, self.num_done[req_id])
            first_positions[req_id] = position

        req_ids = list(scheduled.num_scheduled_tokens)
        asking = [req_id for req_id in req_ids if req_id in self.asking]
        sampled, rows = [], []
        for req_id in req_ids:
            start = first_positions[req_id]
            stop = start + scheduled.num_scheduled_tokens[req_id]
            known = self.tokens[req_id]
            drafts = scheduled.scheduled_spec_decode_tokens.get(req_id, [])
            if self.proposes:
                drafts = propose(known, self.draft_is_right[: len(drafts)])
            fed = [*known, *drafts]
            if req_id in asking:
                rows += [true_row(fed, p, self.weights) for p in range(start, stop)]
            output: list[int] = []
            if stop >= len(known):
                output.append(next_token(known))
                for draft in drafts:
                    if draft != output[-1]:
                        break
                    output.append(next_token([*known, *output]))
                known += output
            self.num_done[req_id] = min(stop, len(known) - 1)
            sampled.append(output)
        return ModelRunnerOutput(
            req_ids=req_ids,
            req_id_to_index={req_id: i for i, req_id in enumerate(req_ids)},
            sampled_token_ids=sampled,
            routed_experts=RoutedExpertsLists(
                req_ids=asking,
                num_rows=np.array([scheduled.num_scheduled_tokens[req_id] for req_id in asking]),
                positions=np.array([first_positions[req_id] for req_id in asking]),
                rows=np.stack(rows),
                moe_layers=MOE_LAYERS,
            )
            if rows
            else None,
        )
