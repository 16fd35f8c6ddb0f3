# SPDX-License-Identifier: Apache-2.0
"""An engine computes with the routed experts that a request gives for a range of its prompt.

The oracle is `transformers`, whose routers take the same experts (`examples/replay.py`).
"""

from __future__ import annotations

import base64
import io
import json
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from examples import forced_experts
from examples.client import decode_rows
from examples.replay import OWN, replay
from harness.server import Server, ServerError
from tests.behaviour.conftest import (
    BLOCK,
    CHUNK,
    ask,
    make_params,
    random_prompt,
    running,
    scheduler_of,
)
from tests.behaviour.test_layouts import serving

if TYPE_CHECKING:
    from vllm.outputs import RequestOutput

pytestmark = pytest.mark.slow

Rows = npt.NDArray[Any]
LAYERS = 4
EXPERTS = 16
TOP_K = 4
# Of log-probabilities: the weights of two float32 formulas.
CLOSE = 1e-5
FORCED: dict[str, Any] = {
    "enable_forced_routed_experts": True,
    "max_num_batched_tokens": 256,
    "kernel_config": {"enable_jit_warmup": False},
}

# One family for each way of weighing that a CPU runs in float32.
WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    "softmax, renormalized": ("qwen3_moe", {"mlp_only_layers": [1]}),
    "softmax of the chosen": ("mixtral", {"num_experts_per_tok": 4, "num_local_experts": 16}),
    "softmax": ("olmoe", {}),
    "sigmoid with bias": ("glm4_moe", {}),
    "sigmoid with bias, groups and scaling": (
        "glm4_moe",
        {"n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5},
    ),
}


@dataclass
class Served:
    model: Path
    llm: Any
    layers: list[int] = field(default_factory=list)

    @cached_property
    def reference(self) -> Any:
        import transformers

        return transformers.AutoModelForCausalLM.from_pretrained(
            self.model, dtype=torch.float32, attn_implementation="eager", local_files_only=True
        ).eval()

    def ask(self, *prompts: Any, **sampling: Any) -> list[RequestOutput]:
        return ask(self.llm, *prompts, **{"logprobs": 3, "prompt_logprobs": 0, **sampling})

    def log_probs(self, tokens: Sequence[int], rows: Rows) -> torch.Tensor:
        """Of `transformers`, whose routers take the rows of the first tokens."""
        routes = torch.full((1, len(tokens), LAYERS, TOP_K), OWN)
        routes[0, : len(rows)] = torch.from_numpy(rows.astype("int64"))
        with torch.inference_mode(), replay(self.reference, routes, self.layers):
            logits = self.reference(torch.tensor([list(tokens)]), use_cache=False).logits[0]
        return logits.log_softmax(-1)

    def random_rows(self, length: int, seed: int = 0) -> Rows:
        """Every layer takes experts at random."""
        rows = np.zeros((length, LAYERS, TOP_K), "uint8")
        scores = np.random.default_rng(seed).random((length, LAYERS, EXPERTS))
        rows[:, self.layers] = scores.argsort(-1)[:, self.layers, :TOP_K]
        return rows

    def forget(self) -> None:
        assert self.llm.reset_prefix_cache()

    def load(self) -> None:
        """Give the engine the weights of the model."""
        self.llm.collective_rpc("reload_weights", kwargs={"weights_path": str(self.model)})
        self.forget()


def give(prompt: list[int], rows: Rows, start: int | None = None) -> dict[str, Any]:
    given: dict[str, Any] = {"prompt_token_ids": prompt, "forced_routed_experts": rows}
    return given if start is None else {**given, "forced_routed_experts_start": start}


def rows_of(output: RequestOutput) -> Rows:
    rows = output.outputs[0].routed_experts
    assert rows is not None
    return rows


def new_log_probs(output: RequestOutput) -> list[dict[int, float]]:
    return [{t: p.logprob for t, p in d.items()} for d in output.outputs[0].logprobs or ()]


def prompt_log_probs(output: RequestOutput) -> npt.NDArray[np.float64]:
    tokens = list(output.prompt_token_ids or ())[1:]
    given = (output.prompt_logprobs or [])[1:]
    return np.array([p[t].logprob for p, t in zip(given, tokens, strict=True) if p])


def assert_same(one: RequestOutput, other: RequestOutput) -> None:
    """Bit for bit."""
    assert one.outputs[0].token_ids == other.outputs[0].token_ids
    assert new_log_probs(one) == new_log_probs(other)
    assert (prompt_log_probs(one) == prompt_log_probs(other)).all()
    assert (rows_of(one) == rows_of(other)).all()


def assert_forced(served: Served, output: RequestOutput, rows: Rows, start: int = 0) -> None:
    """The rows come back, and log-probabilities of prompt and new tokens are those of
    `transformers` under these rows, which routes the new tokens itself."""
    prompt, new = list(output.prompt_token_ids or ()), list(output.outputs[0].token_ids)
    returned = rows_of(output)
    forced = returned[start : start + len(rows)][:, served.layers]
    assert (forced == rows[:, served.layers]).all()
    expected = served.log_probs([*prompt, *new[:-1]], returned[: len(prompt)])
    of_prompt = expected[range(len(prompt) - 1), prompt[1:]].numpy()
    if output.prompt_logprobs:
        assert np.abs(prompt_log_probs(output) - of_prompt).max() < CLOSE
    for at, found in enumerate(new_log_probs(output)):
        of_token = expected[len(prompt) - 1 + at]
        assert int(of_token.argmax()) == new[at]
        assert max(abs(float(of_token[t]) - p) for t, p in found.items()) < CLOSE


def serve(model: Path, **options: Any) -> Iterator[Served]:
    with running(model, **{**FORCED, **options}) as llm:
        layers = ask(llm, random_prompt(99, 8))[0].outputs[0].moe_layers
        yield Served(model, llm, list(layers))


@pytest.fixture(scope="module", params=list(WAYS.values()), ids=list(WAYS))
def each(request: pytest.FixtureRequest, checkpoint: Callable[..., Path]) -> Iterator[Served]:
    family, overrides = request.param
    yield from serve(checkpoint(family, **overrides))


@pytest.fixture(scope="module")
def served(model: Path) -> Iterator[Served]:
    yield from serve(model)


def test_own_rows_change_nothing(each: Served) -> None:
    prompt = random_prompt(1, 100)
    (own,) = each.ask(prompt)
    each.forget()
    (forced,) = each.ask(give(prompt, rows_of(own)[:100]))
    assert_same(own, forced)


def test_own_rows_in_another_order_are_weighed_alike(each: Served) -> None:
    """Then the weights are not the router's own."""
    prompt = random_prompt(2, 100)
    (own,) = each.ask(prompt)
    each.forget()
    (forced,) = each.ask(give(prompt, rows_of(own)[:100, :, ::-1]))
    difference = np.abs(prompt_log_probs(own) - prompt_log_probs(forced))
    assert 0 < difference.max() < CLOSE


def test_random_rows_are_computed_as_transformers_does(each: Served) -> None:
    prompt = random_prompt(3, 100)
    (own,) = each.ask(prompt)
    rows = each.random_rows(100)
    (forced,) = each.ask(give(prompt, rows))
    assert_forced(each, forced, rows)
    assert np.abs(prompt_log_probs(own) - prompt_log_probs(forced)).max() > 0.1


def test_one_layer_is_forced(each: Served) -> None:
    prompt = random_prompt(4, 90)
    rows = np.full((90, LAYERS, TOP_K), -1, "int16")
    layer = each.layers[1]
    rows[:, layer] = each.random_rows(90)[:, layer]
    (forced,) = each.ask(give(prompt, rows))
    assert (rows_of(forced)[:90, layer] == rows[:, layer]).all()
    assert_forced(each, forced, rows_of(forced)[:90])


def test_every_second_token_is_forced(each: Served) -> None:
    prompt = random_prompt(5, 90)
    rows = each.random_rows(90).astype("int32")
    rows[1::2] = -1
    (forced,) = each.ask(give(prompt, rows))
    assert (rows_of(forced)[:90:2, each.layers] == rows[::2, each.layers]).all()
    assert_forced(each, forced, rows_of(forced)[:90])


def test_range_leaves_other_tokens_to_the_router(served: Served) -> None:
    prompt = random_prompt(6, 100)
    (own,) = served.ask(prompt)
    rows = served.random_rows(50)
    (forced,) = served.ask(give(prompt, rows, 20))
    assert (rows_of(forced)[:20] == rows_of(own)[:20]).all()
    assert_forced(served, forced, rows, 20)


def test_rows_of_layers_without_experts_are_ignored(served: Served) -> None:
    prompt = random_prompt(7, 70)
    rows = served.random_rows(70)
    rows[:, 1] = 255
    (forced,) = served.ask(give(prompt, rows))
    assert_forced(served, forced, rows)


def test_prefix_cache_tells_routes_apart(served: Served) -> None:
    prompt = random_prompt(10, 120)
    silent: dict[str, Any] = {"prompt_logprobs": None}
    (clean,) = served.ask(prompt, **silent)
    served.forget()
    rows = served.random_rows(120)
    served.ask(give(prompt, rows), **silent)
    # Without routes: nothing of the forced prefix.
    (after,) = served.ask(prompt, **silent)
    assert after.num_cached_tokens == 0
    assert new_log_probs(after) == new_log_probs(clean)
    assert (rows_of(after) == rows_of(clean)).all()
    # The same routes: all whole blocks, and the rows that they were computed with.
    (again,) = served.ask(give(prompt, rows), **silent)
    assert again.num_cached_tokens == 120 // BLOCK * BLOCK
    assert_forced(served, again, rows)
    # Routes that differ from one token on: the blocks before.
    other = rows.copy()
    other[70:] = served.random_rows(50, seed=1)
    (differs,) = served.ask(give(prompt, other), **silent)
    assert differs.num_cached_tokens == 70 // BLOCK * BLOCK
    assert_forced(served, differs, other)
    # Without routes again: the blocks without.
    (hit,) = served.ask(prompt, **silent)
    assert hit.num_cached_tokens == 120 // BLOCK * BLOCK
    assert hit.outputs[0].token_ids == clean.outputs[0].token_ids


def test_equal_routes_of_other_forms_share_blocks(served: Served) -> None:
    """Dtype, rows of other layers, and tokens left to the router at the ends say nothing."""
    prompt = random_prompt(11, 120)
    rows = served.random_rows(90)
    served.ask(give(prompt, rows, 10), prompt_logprobs=None)
    wider = np.full((110, LAYERS, TOP_K), -1, "int32")
    wider[5:95] = rows
    wider[:, 1] = 3
    wider[:5, served.layers] = -1
    (hit,) = served.ask(give(prompt, wider, 5), prompt_logprobs=None)
    assert hit.num_cached_tokens == 120 // BLOCK * BLOCK


def test_block_before_the_range_is_everybodys(served: Served) -> None:
    prompt = random_prompt(12, 120)
    served.ask(prompt, prompt_logprobs=None)
    rows = served.random_rows(50)
    (forced,) = served.ask(give(prompt, rows, 70), prompt_logprobs=None)
    assert forced.num_cached_tokens == 70 // BLOCK * BLOCK
    assert_forced(served, forced, rows, 70)


def test_neighbour_in_the_batch_is_not_forced(served: Served) -> None:
    prompt = random_prompt(13, 100)
    neighbour = [*prompt[:64], *random_prompt(14, 30)]
    _, beside_unforced = served.ask(prompt, neighbour)
    served.forget()
    rows = served.random_rows(100)
    forced, beside_forced = served.ask(give(prompt, rows), neighbour)
    assert_same(beside_unforced, beside_forced)
    assert_forced(served, forced, rows)


def test_each_of_n_choices_is_forced(served: Served) -> None:
    prompt = random_prompt(15, 100)
    rows = served.random_rows(100)
    sampling: dict[str, Any] = {"n": 3, "temperature": 1.0, "seed": 5, "prompt_logprobs": None}
    (output,) = served.ask(give(prompt, rows), **sampling)
    assert len(output.outputs) == 3
    for choice in output.outputs:
        returned = choice.routed_experts
        assert returned is not None
        assert (returned[:100, served.layers] == rows[:, served.layers]).all()
        expected = served.log_probs([*prompt, *choice.token_ids[:-1]], rows)
        for at, found in enumerate(choice.logprobs or ()):
            of_token = expected[99 + at]
            assert max(abs(float(of_token[t]) - p.logprob) for t, p in found.items()) < CLOSE


def test_resumed_rollout_keeps_the_experts_of_its_prefix(
    served: Served, checkpoint: Callable[..., Path]
) -> None:
    """The weights change. The rows of the interrupted rollout come back, and new tokens follow the
    new weights over the forced prefix."""
    prompt = random_prompt(19, 60)
    (before,) = served.ask(prompt, max_tokens=40)
    prefix = [*prompt, *before.outputs[0].token_ids]
    rows = rows_of(before)
    changed = Served(checkpoint(seed=1, mlp_only_layers=[1]), served.llm, served.layers)
    changed.load()
    try:
        (unforced,) = changed.ask(prefix)
        assert (rows_of(unforced)[: len(rows)] != rows).any()
        (resumed,) = changed.ask(give(prefix, rows))
        assert_forced(changed, resumed, rows)
        assert new_log_probs(resumed) != new_log_probs(unforced)
    finally:
        served.load()


def test_examples_score_resume_and_take_an_expert_away(served: Served) -> None:
    tokens = random_prompt(24, 70)
    (own,) = served.ask(tokens, max_tokens=5)
    rows, layer = rows_of(own), served.layers[1]
    assert (forced_experts.score(served.llm, tokens) == prompt_log_probs(own)).all()
    expert = int(rows[9, layer, 0])
    instead = min(set(range(EXPERTS)).difference(rows[9, layer].tolist()))
    forced = forced_experts.without_expert(rows[:70], layer, expert, instead)
    (without,) = served.ask(give(tokens, forced))
    assert instead in rows_of(without)[9, layer]
    assert expert not in rows_of(without)[9, layer]
    found = forced_experts.score(served.llm, tokens, forced)
    assert (found == prompt_log_probs(without)).all()
    assert (found != prompt_log_probs(own)).any()
    so_far = [*tokens, *own.outputs[0].token_ids]
    params = make_params(max_tokens=4, logprobs=3)
    assert_forced(served, forced_experts.resume(served.llm, so_far, rows, params), rows)


WRONG: dict[str, tuple[Callable[[Rows], Any], int | None, str]] = {
    "list": (lambda rows: rows.tolist(), None, "NumPy array"),
    "float": (lambda rows: rows.astype("float32"), None, "not float32"),
    "int64": (lambda rows: rows.astype("int64"), None, "not int64"),
    "two axes": (lambda rows: rows[:, 0], None, r"shape \(tokens, 4, 4\)"),
    "layers": (lambda rows: rows[:, :3], None, r"not \(80, 3, 4\)"),
    "top-k": (lambda rows: rows[:, :, :3], None, r"not \(80, 4, 3\)"),
    "id": (lambda rows: np.where(rows == rows[3, 2, 1], 16, rows), None, "ids from 0 to 15"),
    "minus two": (lambda rows: rows.astype("int16") - 2, None, "ids from 0 to 15"),
    "part of a row": (lambda rows: with_one(rows, -1), None, "position 7 in layer 2"),
    "twice": (lambda rows: with_one(rows, int(rows[7, 2, 1])), None, "one twice"),
    "too long": (lambda rows: rows, 1, "rows of 80 tokens from position 1"),
    "start after the prompt": (lambda rows: rows[:0], 81, "from 0 to 80"),
    "negative start": (lambda rows: rows, -1, "from 0 to 80"),
    "start without rows": (lambda rows: None, 3, "needs forced_routed_experts"),
}


def with_one(rows: Rows, expert: int) -> Rows:
    rows = rows.astype("int32")
    rows[7, 2, 0] = expert
    return rows


@pytest.mark.parametrize("name", WRONG)
def test_wrong_rows_are_refused(served: Served, name: str) -> None:
    from vllm.exceptions import VLLMValidationError

    change, start, message = WRONG[name]
    rows = change(served.random_rows(80))
    with pytest.raises(VLLMValidationError, match=message):
        served.ask(give(random_prompt(20, 80), rows, start))
    # The engine goes on.
    assert served.ask(random_prompt(20, 80))[0].finished


def test_beam_search_is_refused(served: Served) -> None:
    from vllm.exceptions import VLLMValidationError
    from vllm.sampling_params import BeamSearchParams

    prompt = give(random_prompt(21, 40), served.random_rows(40))
    with pytest.raises(VLLMValidationError, match="beam search"):
        served.llm.beam_search([prompt], BeamSearchParams(beam_width=2, max_tokens=2))


# Tests with an engine of their own come last: two engines share the state of a process.


def test_chunks_take_their_rows(model: Path) -> None:
    for chunked in serve(model, max_num_batched_tokens=CHUNK):
        prompt = random_prompt(8, 150)
        rows = chunked.random_rows(150)
        (own,) = chunked.ask(prompt)
        chunked.forget()
        assert_same(own, *chunked.ask(give(prompt, rows_of(own)[:150])))
        (forced,) = chunked.ask(give(prompt, rows))
        assert_forced(chunked, forced, rows)


def test_compiled_model_takes_rows(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCH_COMPILE_DISABLE", raising=False)
    for compiled in serve(model, enforce_eager=False):
        prompt = random_prompt(9, 100)
        (own,) = compiled.ask(prompt)
        compiled.forget()
        assert_same(own, *compiled.ask(give(prompt, rows_of(own)[:100])))
        rows = compiled.random_rows(100)
        (forced,) = compiled.ask(give(prompt, rows))
        assert_forced(compiled, forced, rows)


def test_preempted_request_is_forced_again(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    preempted: list[str] = []
    for tight in serve(model, num_gpu_blocks_override=12, max_model_len=256):
        scheduler = scheduler_of(tight.llm)
        preempt = scheduler._preempt_request

        def note(request: Any, *more: Any, _preempt: Any = preempt, **named: Any) -> Any:
            preempted.append(request.request_id)
            return _preempt(request, *more, **named)

        monkeypatch.setattr(scheduler, "_preempt_request", note)
        prompts = [random_prompt(seed, 150) for seed in (16, 17)]
        given = [tight.random_rows(150, seed) for seed in (0, 1)]
        outputs = tight.ask(
            *map(give, prompts, given), max_tokens=60, logprobs=1, prompt_logprobs=None
        )
        assert preempted
        for output, rows in zip(outputs, given, strict=True):
            assert_forced(tight, output, rows)


def test_without_prefix_caching(model: Path) -> None:
    for uncached in serve(model, enable_prefix_caching=False):
        prompt = random_prompt(18, 100)
        rows = uncached.random_rows(100)
        (forced,) = uncached.ask(give(prompt, rows))
        assert_forced(uncached, forced, rows)


def encode(rows: Rows) -> str:
    file = io.BytesIO()
    np.save(file, rows)
    return base64.b64encode(file.getvalue()).decode()


@pytest.fixture(scope="module")
def server(
    model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Server, Served]]:
    """A server with two tensor parallel workers, and its reference."""
    log = tmp_path_factory.mktemp("forced") / "server.log"
    arguments = ["--enforce-eager", "--tensor-parallel-size=2", "--enable-forced-routed-experts"]
    with serving(model, log, *arguments) as server:
        yield server, Served(model, None, [0, 2, 3])


def post(server: Server, path: str, **body: Any) -> dict[str, Any]:
    reply: dict[str, Any] = server.post(
        path, {"model": server.checkpoint, "temperature": 0.0, **body}, 240.0
    )
    return reply


GENERATE = "/inference/v1/generate"
COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"


def test_rows_of_an_answer_go_into_the_next_request(server: tuple[Server, Served]) -> None:
    """Unchanged, in their base64: the next request gets the same rows and tokens."""
    served, reference = server
    prompt = random_prompt(30, 150)
    sampling = {"max_tokens": 9, "ignore_eos": True, "temperature": 0.0}
    rows = reference.random_rows(150)
    given = {
        "token_ids": prompt,
        "sampling_params": sampling,
        "forced_routed_experts": encode(rows),
    }
    (one,) = post(served, GENERATE, **given)["choices"]
    returned = decode_rows(one["routed_experts"])
    assert (returned[:150, reference.layers] == rows[:, reference.layers]).all()
    expected = reference.log_probs([*prompt, *one["token_ids"][:-1]], rows)[149:]
    assert expected.argmax(-1).tolist() == one["token_ids"]
    # The first tokens of the next prompt are forced, and the last one is routed.
    longer = [*prompt, *one["token_ids"]]
    given["token_ids"], given["forced_routed_experts"] = longer, one["routed_experts"]
    (two,) = post(served, GENERATE, **given)["choices"]
    assert (decode_rows(two["routed_experts"])[: len(returned)] == returned).all()


@pytest.mark.parametrize("stream", [False, True])
def test_completions_take_rows(server: tuple[Server, Served], stream: bool) -> None:
    served, reference = server
    prompt = random_prompt(31, 70)
    rows = reference.random_rows(40)
    body = {
        "model": served.checkpoint,
        "temperature": 0.0,
        "prompt": prompt,
        "max_tokens": 6,
        "ignore_eos": True,
        "stream": stream,
        "return_token_ids": True,
        "return_routed_experts": True,
        "routed_experts_in_last_chunk": True,
        "forced_routed_experts": encode(rows),
        "forced_routed_experts_start": 25,
    }
    request = urllib.request.Request(
        f"{served.url}{COMPLETIONS}",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=240) as answer:
        text = answer.read().decode()
    if stream:
        events = [json.loads(e[6:]) for e in text.split("\n\n") if e.startswith("data: {")]
        choices = [choice for event in events for choice in event["choices"]]
        tokens = [t for choice in choices for t in choice["token_ids"] or ()]
        (returned,) = [c["routed_experts"] for c in choices if c.get("routed_experts")]
    else:
        (choice,) = json.loads(text)["choices"]
        tokens, returned = choice["token_ids"], choice["routed_experts"]
    all_rows = decode_rows(returned)
    forced = all_rows[25:65, reference.layers]
    assert (forced == rows[:, reference.layers]).all()
    expected = reference.log_probs([*prompt, *tokens[:-1]], all_rows[:70])[69:]
    assert expected.argmax(-1).tolist() == tokens


def test_chat_takes_rows(server: tuple[Server, Served]) -> None:
    served, reference = server
    rows = reference.random_rows(8)
    messages = [{"role": "user", "content": "one two three four five six"}]
    given = {"forced_routed_experts": encode(rows), "forced_routed_experts_start": 1}
    reply = post(served, CHAT, messages=messages, max_tokens=3, return_routed_experts=True, **given)
    returned = decode_rows(reply["choices"][0]["routed_experts"])
    assert (returned[1:9, reference.layers] == rows[:, reference.layers]).all()


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        (COMPLETIONS, {"prompt": [[5] * 9, [6] * 9]}, "for one prompt"),
        (COMPLETIONS, {"prompt": [5] * 9, "stream": True}, "rows of 30 tokens"),
        (COMPLETIONS, {"prompt": [5] * 40, "use_beam_search": True, "n": 2}, "beam search"),
        (CHAT, {"messages": [{"role": "user", "content": "a"}]}, "rows of 30 tokens|at most"),
        (GENERATE, {"token_ids": [5] * 9, "sampling_params": {}}, "rows of 30 tokens"),
        (
            GENERATE,
            {"token_ids": [5] * 9, "sampling_params": {}, "forced_routed_experts": "?"},
            "base64",
        ),
        ("/v1/responses", {"input": "a"}, "cannot be given with /v1/responses"),
    ],
)
def test_request_that_cannot_be_forced_is_http_400(
    server: tuple[Server, Served], path: str, body: dict[str, Any], message: str
) -> None:
    served, reference = server
    given = {"forced_routed_experts": encode(reference.random_rows(30)), **body}
    with pytest.raises(ServerError, match=rf"(?s)400.*({message})"):
        post(served, path, **given)


def test_rows_need_the_flag(model: Path) -> None:
    from vllm.exceptions import VLLMValidationError

    with running(model) as llm:
        rows = np.zeros((40, LAYERS, TOP_K), "uint8")
        with pytest.raises(VLLMValidationError, match="--enable-forced-routed-experts"):
            ask(llm, give(random_prompt(22, 40), rows))
