# SPDX-License-Identifier: Apache-2.0
"""The experts' weights without an engine. What a router hands to the capture is compared with the
formulas of the papers. A request gets the weights only if it asks. Mutants fail here.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from vllm.model_executor.layers.fused_moe.router.cpu_router import CPURouter
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreOutput, FinishReason, OutputRoutedExperts
from vllm.v1.engine.output_processor import OutputProcessor

from harness import scheduling
from tests.v0_33_0.connector.runner import RECORD, weigh, widen

TOP_K, EXPERTS = 3, 8
LOGITS = np.random.default_rng(0).normal(size=(5, EXPERTS)).astype(np.float32)
BIAS = np.linspace(-1, 1, EXPERTS, dtype=np.float32)


def captured(**options: Any) -> tuple[np.ndarray, np.ndarray]:
    """Ids and weights that the router hands to the capture."""
    force = options.pop("force", None)
    router = CPURouter(top_k=TOP_K, global_num_experts=EXPERTS, **options)
    router.force_fn = force
    seen: list[np.ndarray] = []

    def keep(tensor: torch.Tensor) -> None:
        seen.append(tensor.numpy().copy())

    router.set_capture_fn(keep, keep)
    logits = torch.from_numpy(LOGITS)
    router.select_experts(hidden_states=logits, router_logits=logits)
    weights, ids = seen
    return ids, weights


@pytest.mark.parametrize("factor", [1.0, 2.5])
@pytest.mark.parametrize("renormalize", [True, False])
@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
@pytest.mark.parametrize("biased", [True, False])
def test_weights_are_scores_after_normalization(
    scoring: str, renormalize: bool, biased: bool, factor: float
) -> None:
    ids, weights = captured(
        scoring_func=scoring,
        renormalize=renormalize,
        e_score_correction_bias=torch.from_numpy(BIAS) if biased else None,
        routed_scaling_factor=factor,
    )
    if scoring == "softmax":
        scores = np.exp(LOGITS) / np.exp(LOGITS).sum(-1, keepdims=True)
    else:
        scores = 1 / (1 + np.exp(-LOGITS))
    choice = np.argsort(-(scores + BIAS * biased), axis=-1)[:, :TOP_K]
    np.testing.assert_array_equal(np.sort(ids), np.sort(choice))
    expected = np.take_along_axis(scores, ids.astype(np.int64), axis=-1)
    if renormalize:
        expected /= expected.sum(-1, keepdims=True)
    # Without a bias, the router has no scaling factor.
    np.testing.assert_allclose(weights, expected * (factor if biased else 1.0), rtol=1e-5)


def test_weights_of_forced_experts_are_those_that_are_used() -> None:
    ids, weights = captured(force=lambda logits, weights, ids: (weights / 2, ids + 1))
    own_ids, own_weights = captured()
    np.testing.assert_array_equal(ids, own_ids + 1)
    np.testing.assert_array_equal(weights, own_weights / 2)


@pytest.mark.parametrize("asks", [True, False])
def test_only_a_request_that_asks_gets_weights(asks: bool) -> None:
    """Its rows come in messages with weights: another request of the message asks."""
    processor = OutputProcessor(None, log_stats=False)
    processor.routed_experts_record = RECORD
    params = SamplingParams(return_routed_experts_weights=asks, detokenize=False)
    processor.add_request(scheduling.make_request("0", [1, 2], params), prompt=None)
    ids = np.arange(48, dtype=np.uint16).reshape(12, 2, 2)
    # Few rows are copied, many are not.
    for rows, reason in ((ids[:10], None), (ids[10:], FinishReason.LENGTH)):
        experts = OutputRoutedExperts([widen(rows)])
        output = EngineCoreOutput("0", [7], finish_reason=reason, routed_experts=experts)
        answers = processor.process_outputs([output]).request_outputs
    (completion,) = answers[0].outputs
    np.testing.assert_array_equal(completion.routed_experts, ids)
    if asks:
        np.testing.assert_array_equal(completion.routed_experts_weights, weigh(ids))
    else:
        assert completion.routed_experts_weights is None
        assert completion.routed_experts_pieces[0].shape[1:] == (2, 2)
