# SPDX-License-Identifier: Apache-2.0
"""Replay makes a model take the given experts, and the comparison finds what it changes. Models are
those of `transformers`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers

from demos.replay import mismatch, report
from examples.client import Completion
from examples.replay import OWN, ReplayError, pad_routes, place_routes, replay
from harness.families import EXPERTS, FAMILIES, find
from harness.oracle import route
from tests.unit.test_client import LAYERS, TOP_K, make_choice, make_rows, read


@pytest.fixture(scope="module")
def load(checkpoint: Callable[..., Path]) -> Callable[..., Any]:
    def load(family: str = "qwen3_moe", **overrides: Any) -> Any:
        return transformers.AutoModelForCausalLM.from_pretrained(
            checkpoint(family, **overrides), dtype=torch.float32, attn_implementation="eager"
        ).eval()

    return load


# Families whose routes `examples/replay.py` replays.
REPLAYED = [
    "qwen3_moe",
    "mixtral",
    "olmoe",
    "glm4_moe",
    "deepseek_v2",
    "deepseek_v3",
    "gpt_oss",
    "hunyuan_v1_moe",
]


def batch(sequences: int = 2, length: int = 12) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(0).integers(4, 700, (sequences, length)))


def top_ks(model: Any, family: str) -> list[int]:
    top_k = getattr(model.config, FAMILIES[family].top_k)
    return top_k if isinstance(top_k, list) else [top_k] * model.config.num_hidden_layers


def moe_blocks(model: Any, family: str) -> dict[int, Any]:
    """The MoE block of each decoder layer that has one."""
    names = [router.partition(".")[0] for router in FAMILIES[family].router]
    blocks = {index: find(layer, names) for index, layer in enumerate(model.model.layers)}
    return {index: block for index, block in blocks.items() if hasattr(block, "experts")}


def random_routes(model: Any, family: str, tokens: torch.Tensor) -> torch.Tensor:
    """A random set of experts for every token and layer; a layer that takes fewer than the
    widest repeats its last."""
    ks, rng = top_ks(model, family), np.random.default_rng(1)
    experts = find(model.config, EXPERTS)
    routes = torch.zeros(*tokens.shape, len(ks), max(ks), dtype=torch.int64)
    for *at, layer in np.ndindex(*routes.shape[:3]):
        ids = rng.permutation(experts)[: ks[layer]]
        routes[(*at, layer)] = torch.from_numpy(np.pad(ids, (0, max(ks) - len(ids)), "edge"))
    return routes


@contextmanager
def watching(blocks: dict[int, Any]) -> Iterator[dict[int, list[set[int]]]]:
    """By layer and token, the experts that received the token's hidden state, as seen at the inputs
    of the experts."""
    used: dict[int, list[set[int]]] = {}
    hidden: dict[int, torch.Tensor] = {}
    handles = []

    def at_block(layer: int, inputs: tuple[Any, ...]) -> None:
        hidden[layer] = inputs[0].flatten(0, -2)
        used[layer] = [set() for _ in hidden[layer]]

    def at_expert(layer: int, expert: int, fed: torch.Tensor) -> None:
        same = (hidden[layer][:, None] == fed[None]).all(dim=-1)  # (tokens, fed)
        assert (same.sum(dim=0) == 1).all(), "hidden states must tell the tokens apart"
        for token in same.any(dim=1).nonzero().flatten().tolist():
            used[layer][token].add(expert)

    def at_experts(layer: int, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # All experts in one module. It gets the ids of each token or, in older releases of
        # `transformers`, a weight for every expert, which is zero where the expert is not used.
        weights = kwargs.get("routing_weights")
        for token in range(len(used[layer])):
            ids = inputs[1][token] if weights is None else weights[token].nonzero().flatten()
            used[layer][token] = set(ids.tolist())

    for layer, block in blocks.items():
        handles.append(block.register_forward_pre_hook(lambda _, i, n=layer: at_block(n, i)))
        if isinstance(block.experts, torch.nn.ModuleList):
            for expert, module in enumerate(block.experts):
                handles.append(
                    module.register_forward_pre_hook(
                        lambda _, i, n=layer, e=expert: at_expert(n, e, i[0].flatten(0, -2))
                    )
                )
        else:
            handles.append(
                block.experts.register_forward_pre_hook(
                    lambda _, i, kw, n=layer: at_experts(n, i, kw), with_kwargs=True
                )
            )
    try:
        yield used
    finally:
        for handle in handles:
            handle.remove()


@pytest.mark.parametrize("family", REPLAYED)
@torch.inference_mode()
def test_experts_that_work_are_the_given_ones(load: Callable[..., Any], family: str) -> None:
    model, tokens = load(family), batch()
    blocks = moe_blocks(model, family)
    routes = random_routes(model, family, tokens)
    with watching(blocks) as used, replay(model, routes, list(blocks)):
        model(tokens, use_cache=False)
    assert used
    for layer, sets in used.items():
        given = routes[:, :, layer].flatten(0, 1).tolist()
        assert sets == [set(ids) for ids in given]


@pytest.mark.parametrize("family", REPLAYED)
@torch.inference_mode()
def test_own_routes_replayed_change_no_bit(load: Callable[..., Any], family: str) -> None:
    model, tokens = load(family), batch()
    layers = list(moe_blocks(model, family))
    plain = model(tokens, use_cache=False).logits
    ks = top_ks(model, family)
    routes = torch.full((*tokens.shape, len(ks), max(ks)), OWN)
    with replay(model, routes, layers) as own:
        assert torch.equal(model(tokens, use_cache=False).logits, plain)
    for layer in layers:
        ids = own[layer].view(*tokens.shape, -1)
        routes[:, :, layer] = F.pad(ids.sort().values, (0, max(ks) - ids.shape[-1]))
    with replay(model, routes, layers):
        assert torch.equal(model(tokens, use_cache=False).logits, plain)


def expert_output(block: Any, expert: int, hidden: torch.Tensor) -> torch.Tensor:
    """What one expert makes of the hidden state of a token."""
    experts = block.experts
    if isinstance(experts, torch.nn.ModuleList):
        return experts[expert](hidden)
    # All experts in one module.
    gate, up = F.linear(hidden, experts.gate_up_proj[expert]).chunk(2, dim=-1)
    return F.linear(F.silu(gate) * up, experts.down_proj[expert])


@pytest.mark.parametrize(("family", "renormalised"), [("qwen3_moe", True), ("olmoe", False)])
@torch.inference_mode()
def test_weights_are_the_models_own_for_the_given_experts(
    load: Callable[..., Any], family: str, renormalised: bool
) -> None:
    model, tokens = load(family), batch()
    routes = random_routes(model, family, tokens)
    block = moe_blocks(model, family)[2]
    seen: dict[str, torch.Tensor] = {}
    block.register_forward_hook(
        lambda _, i, o: seen.update(x=i[0].flatten(0, 1), y=o[0] if isinstance(o, tuple) else o)
    )
    with replay(model, routes, range(4)):
        model(tokens, use_cache=False)
    logits = block.gate(seen["x"])
    scores = (logits[0] if isinstance(logits, tuple) else logits).softmax(dim=-1)
    for token, ids in enumerate(routes[:, :, 2].flatten(0, 1)):
        weights = scores[token, ids]
        if renormalised:
            weights = weights / weights.sum()
        outputs = torch.stack([expert_output(block, int(e), seen["x"][token]) for e in ids])
        torch.testing.assert_close(seen["y"].flatten(0, 1)[token], weights @ outputs)


@torch.inference_mode()
def test_token_without_a_row_is_routed_by_the_model(load: Callable[..., Any]) -> None:
    model, tokens = load(), batch()
    blocks = moe_blocks(model, "qwen3_moe")
    routes = random_routes(model, "qwen3_moe", tokens)
    routes[0, -1] = routes[1, :5] = OWN
    with watching(blocks) as used, replay(model, routes, range(4)) as own:
        model(tokens, use_cache=False)
    without = (routes[:, :, 0, 0] == OWN).flatten()
    for layer in blocks:
        for token in range(tokens.numel()):
            given = (
                own[layer][token] if without[token] else routes[:, :, layer].flatten(0, 1)[token]
            )
            assert used[layer][token] == set(given.tolist())


def test_routers_get_gradients_also_with_checkpointing(load: Callable[..., Any]) -> None:
    tokens = batch()
    gradients = []
    for checkpointing in (False, True):
        model = load().train()
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        with replay(model, random_routes(model, "qwen3_moe", tokens), range(4)):
            model(tokens, labels=tokens, use_cache=False).loss.backward()
        gradients.append(
            [block.gate.weight.grad for block in moe_blocks(model, "qwen3_moe").values()]
        )
    for plain, recomputed in zip(*gradients, strict=True):
        assert plain.abs().max() > 0
        torch.testing.assert_close(plain, recomputed)


@pytest.mark.parametrize(
    ("change", "moe_layers", "told"),
    [
        (lambda r: r[0], range(4), "wanted integers of shape"),
        (lambda r: r[:, :, :3], range(4), "wanted integers of shape"),
        (lambda r: r.float(), range(4), "wanted integers of shape"),
        (lambda r: r.clone().fill_(16), range(4), "none of 16"),
        (lambda r: r - 2 * (r == 0), range(4), "none of 16"),
        (lambda r: r.index_fill(3, torch.tensor([1]), OWN), range(4), "some experts given"),
        (lambda r: r, [0, 1, 2, 3, 4], "there are 4 layers"),
        (lambda r: r, [0, 1, 3], "layer 2 chose experts by torch.topk 1 times"),
        (lambda r: torch.zeros_like(r), range(4), "layer 0 twice"),
        (lambda r: r[:, :-1], range(4), "4 experts for each of 24 tokens; .* 4 for each of 22"),
        (lambda r: r[..., :3], range(4), "takes 4 experts .* have 3 for each"),
    ],
)
@torch.inference_mode()
def test_routes_that_do_not_fit_are_an_error(
    load: Callable[..., Any], change: Callable[[torch.Tensor], Any], moe_layers: Any, told: str
) -> None:
    model, tokens = load(), batch()
    plain = model(tokens, use_cache=False).logits
    routes = change(random_routes(model, "qwen3_moe", tokens))
    with pytest.raises(ReplayError, match=told), replay(model, routes, moe_layers):
        model(tokens, use_cache=False)
    # The model is unchanged again.
    assert not any("forward" in vars(layer) for layer in model.model.layers)
    assert torch.equal(model(tokens, use_cache=False).logits, plain)


def test_group_limited_routers_are_refused(load: Callable[..., Any]) -> None:
    model = load("deepseek_v2")
    model.config.topk_method = "group_limited_greedy"
    routes = random_routes(model, "deepseek_v2", batch())
    with pytest.raises(ReplayError, match="group_limited_greedy"), replay(model, routes, [1, 2, 3]):
        pass


def test_wrapper_of_another_is_kept(load: Callable[..., Any]) -> None:
    model, tokens = load(), batch()
    layer = model.model.layers[0]
    calls: list[int] = []
    inner = layer.forward

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return inner(*args, **kwargs)

    layer.forward = wrapper
    with replay(model, random_routes(model, "qwen3_moe", tokens), range(4)):
        model(tokens, use_cache=False)
    assert calls == [1]
    assert layer.forward is wrapper


def test_rows_of_a_batch_stand_at_their_positions() -> None:
    rows = make_rows(6)
    whole = read(make_choice(rows))
    later = read(make_choice(rows[2:], routed_experts_start=2))
    routes = pad_routes([whole, later], 9)
    assert routes.shape == (2, 9, LAYERS, TOP_K)
    np.testing.assert_array_equal(routes[0, :6], rows)
    np.testing.assert_array_equal(routes[1, 2:6], rows[2:])
    assert (routes[:, 6:] == OWN).all()
    assert (routes[1, :2] == OWN).all()


def pad_both_sides(length: int, *sequences: tuple[int, Completion]) -> list[torch.Tensor]:
    """Tokens and mask: each completion behind its number of padding tokens."""
    tokens, mask = torch.full((len(sequences), length), 3), torch.zeros(len(sequences), length)
    for i, (left, completion) in enumerate(sequences):
        ids = [*completion.prompt, *completion.token_ids]
        tokens[i, left : left + len(ids)] = torch.tensor(ids)
        mask[i, left : left + len(ids)] = 1
    return [tokens, mask]


@pytest.fixture
def two() -> list[Completion]:
    """Two completions with random rows, of 7 and of 5 tokens."""
    whole = read(make_choice(make_rows(6)))
    cut = replace(whole, token_ids=whole.token_ids[:-2], rows=whole.rows[:0:-1][:4])
    return [whole, cut]


@pytest.mark.parametrize(("left", "length"), [((0, 0), 9), ((2, 4), 9), ((1, 2), 12), ((0, 2), 7)])
def test_rows_stand_at_their_tokens_wherever_padding_is(
    two: list[Completion], left: tuple[int, int], length: int
) -> None:
    routes = place_routes(two, *pad_both_sides(length, *zip(left, two, strict=True)))
    for placed, begin, completion in zip(routes, left, two, strict=True):
        end = begin + len(completion.rows)
        np.testing.assert_array_equal(placed[begin:end], completion.rows)
        # Padding, and the last token, which has no row.
        assert (placed[:begin] == OWN).all()
        assert (placed[end:] == OWN).all()


def test_completion_that_a_trainer_masks_leaves_the_rows_of_its_prompt(
    two: list[Completion],
) -> None:
    tokens, mask = pad_both_sides(9, (2, two[0]), (4, two[1]))
    end = 2 + len(two[0].prompt)
    mask[0, end:] = 0
    routes = place_routes(two, tokens, mask)
    np.testing.assert_array_equal(routes[0, 2:end], two[0].prompt_rows)
    assert (routes[0, end:] == OWN).all()


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda c: {"rows": c.rows[:-1]}, "sequence 0 of 7 tokens has rows of shape .5, "),
        (lambda c: {"rows": c.rows[1:], "start": 1}, "from position 1; wanted .6, "),
        (
            lambda c: {"token_ids": (c.token_ids[0] + 1, *c.token_ids[1:])},
            "the tokens of sequence 0 are not those",
        ),
        (lambda c: {"rows": c.rows[..., :-1]}, "sequence 1 of 5 tokens has rows of shape"),
    ],
)
def test_rows_that_do_not_fit_the_tokens_of_a_batch_are_an_error(
    two: list[Completion], change: Callable[[Completion], Any], told: str
) -> None:
    tokens, mask = pad_both_sides(9, (2, two[0]), (4, two[1]))
    wrong = replace(two[0], **change(two[0]))
    with pytest.raises(ReplayError, match=told):
        place_routes([wrong, two[1]], tokens, mask)


def test_batch_with_another_number_of_completions_is_an_error(two: list[Completion]) -> None:
    with pytest.raises(ReplayError, match="1 completions for 2 sequences"):
        place_routes(two[:1], *pad_both_sides(9, (2, two[0]), (4, two[1])))


# The comparison.


@torch.no_grad()
def complete(model: Any, checkpoint: Path, tokens: list[int], prompt: int) -> Completion:
    """A completion whose rows and log-probs are the model's own; its prompt has `prompt` tokens."""
    logprobs = model(torch.tensor([tokens]), use_cache=False).logits[0].log_softmax(dim=-1)
    routes = route(checkpoint, tokens)
    return Completion(
        prompt=tuple(tokens[:prompt]),
        token_ids=tuple(tokens[prompt:]),
        logprobs=tuple(logprobs[p - 1, tokens[p]].item() for p in range(prompt, len(tokens))),
        rows=routes.ids.transpose(1, 0, 2)[:-1].astype(np.uint8),
        start=0,
        moe_layers=routes.layers,
        finish_reason="length",
    )


@pytest.fixture(scope="module")
def sampled(
    load: Callable[..., Any], checkpoint: Callable[..., Path]
) -> tuple[Any, list[Completion]]:
    """A model, and completions of unlike lengths."""
    model, lengths = load(), ((5, 20), (9, 14), (1, 17))
    return model, [
        complete(model, checkpoint(), batch(1, length)[0].tolist(), prompt)
        for prompt, length in lengths
    ]


def test_decision_that_differs_is_found_where_it_is(sampled: tuple[Any, list[Completion]]) -> None:
    model, completions = sampled
    rows = completions[1].rows.copy()
    ids = rows[6, 2]
    ids[0] = next(e for e in range(16) if e not in ids)
    found = mismatch.measure(
        model, [completions[0], replace(completions[1], rows=rows)], replayed=False
    )
    assert np.argwhere(found.differs[1]).tolist() == [[6, 2]]
    assert not found.differs[0].any()


def make_result(scale: float, control: float) -> report.Result:
    rng = np.random.default_rng(0)
    delta = [rng.normal(size=50) for _ in range(40)]
    differs = [np.zeros((53, 2), bool)] * 40
    noise = [rng.normal(size=50) for _ in range(40)]
    plain, replayed, exact = (
        mismatch.Mismatch(values, differs)
        for values in (delta, [scale * d for d in noise], [control * d for d in delta])
    )
    return report.Result([], 0.1, exact, plain, replayed)


@pytest.mark.parametrize(
    ("scale", "control", "faults"),
    [
        (0.5, 0.0, []),
        (1.0, 0.0, ["not clearly nearer"]),
        (2.0, 0.0, ["not clearly nearer"]),
        (0.5, 0.5, ["even in float32"]),
    ],
)
def test_replay_passes_if_it_is_nearer_and_the_trainer_is_right_in_float32(
    scale: float, control: float, faults: list[str]
) -> None:
    for found, told in zip(report.faults(make_result(scale, control)), faults, strict=True):
        assert told in found
