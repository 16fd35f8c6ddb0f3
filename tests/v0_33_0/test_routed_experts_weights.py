# SPDX-License-Identifier: Apache-2.0
"""`--routed-experts-weights`: rows come with the weights by which `transformers` multiplies the
experts. Only requests that ask get them."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import numpy as np
import numpy.typing as npt
import pybase64
import pytest

from examples.client import decode_rows
from harness import disaggregated, oracle
from harness.disaggregated import Pair
from harness.server import Server
from harness.weights import CLOSE, WAYS, differences
from tests.behaviour.conftest import (
    BLOCK,
    CHUNK,
    ask,
    assert_rows,
    make_params,
    random_prompt,
    running,
    scheduler_of,
)
from tests.behaviour.test_layouts import serving
from tests.v0_33_0.host_offload import LOADED, offloading

if TYPE_CHECKING:
    from vllm import LLM
    from vllm.outputs import CompletionOutput, RequestOutput

pytestmark = pytest.mark.slow

Array = npt.NDArray[Any]
ASK = "return_routed_experts_weights"


def assert_weights(
    model: Path,
    tokens: Sequence[int],
    rows: Array,
    weights: Array,
    factor: float = 1.0,
    start: int = 0,
    close: float = CLOSE,
) -> None:
    """Ids and weights of the tokens agree with `transformers`."""
    assert_rows(model, tokens, rows, start)
    assert weights.shape == rows.shape
    found, same = differences(model, tokens, rows, weights, factor, start)
    assert found.shape[1] == len(oracle.load(model).layers)
    # Where tied experts were chosen, the oracle has others.
    assert (same.mean(axis=0) > 0.95).all()
    assert found[same].max() <= close


def assert_true(
    model: Path, output: RequestOutput, factor: float = 1.0, close: float = CLOSE
) -> None:
    for completion in output.outputs:
        tokens = [*(output.prompt_token_ids or ()), *completion.token_ids]
        rows, weights = completion.routed_experts, completion.routed_experts_weights
        assert rows is not None
        assert weights is not None
        assert_weights(model, tokens, rows, weights, factor, close=close)


def weights_of(completion: CompletionOutput) -> Array:
    assert completion.routed_experts_weights is not None
    return completion.routed_experts_weights


@pytest.mark.parametrize("family", WAYS)
def test_weights_are_what_transformers_multiplies_experts_with(
    family: str, checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cold, in chunks, and on a cached prefix."""
    # As in `test_all_families.py`: the oracle uses the classes that vLLM would change.
    base = "vllm.model_executor.models.transformers.base.Base"
    monkeypatch.setattr(f"{base}._decorate_for_torch_compile", lambda self: None)
    overrides, factor = WAYS[family]
    model = checkpoint(family, **overrides)
    oracle.load(model)
    with running(model, routed_experts_weights="float32") as llm:
        long = random_prompt(1, 2 * CHUNK + 9)
        cold = ask(llm, random_prompt(0, 5), long, **{ASK: True}, max_tokens=BLOCK)
        (hit,) = ask(llm, [*long, *cold[1].outputs[0].token_ids, 7, 8], **{ASK: True})
    # Gemma 4 finds no prefix on a CPU, LFM2 a shorter one.
    if family not in ("gemma4_text", "lfm2_moe"):
        assert hit.num_cached_tokens >= 4 * BLOCK
    for output in (*cold, hit):
        assert_true(model, output, factor)


@pytest.fixture(scope="module")
def llm(model: Path) -> Iterator[LLM]:
    with running(model, routed_experts_weights="float32") as llm:
        yield llm


def test_only_who_asks_gets_weights(model: Path, llm: LLM) -> None:
    """Of one batch. All of its prompts are the same: they share blocks."""
    prompt = random_prompt(20, 2 * BLOCK + 3)
    each: list[dict[str, Any]] = [{ASK: True}, {}, {"return_routed_experts": True}, {ASK: False}]
    each += [{"return_routed_experts": False}, {"extra_args": {ASK: "true"}}]
    for _ in range(2):
        outputs = [output.outputs[0] for output in ask(llm, *[prompt] * 6, each=each)]
        rows = [output.routed_experts for output in outputs]
        for asked in (outputs[0], outputs[5]):
            tokens = [*prompt, *asked.token_ids]
            assert_weights(model, tokens, asked.routed_experts, weights_of(asked))
        assert all(output.routed_experts_weights is None for output in outputs[1:5])
        assert rows[4] is None
        for others in rows[1:4]:
            assert others is not None
            assert others.dtype == np.uint8
            np.testing.assert_array_equal(others, rows[0])
            assert others.nbytes == others.size


def test_rows_that_begin_later_have_the_weights_of_their_tokens(model: Path, llm: LLM) -> None:
    prompt = random_prompt(21, BLOCK + 9)
    for start in (0, 3, BLOCK, len(prompt)):
        (output,) = ask(llm, prompt, routed_experts_prompt_start=start, **{ASK: True})
        (completion,) = output.outputs
        assert completion.routed_experts_start == start
        tokens = [*prompt, *completion.token_ids]
        rows = completion.routed_experts
        assert_weights(model, tokens, rows, weights_of(completion), start=start)


def test_streamed_weights_come_with_their_rows(model: Path, llm: LLM) -> None:
    from vllm.sampling_params import RequestOutputKind

    prompt = random_prompt(22, CHUNK + 30)
    params = make_params(output_kind=RequestOutputKind.DELTA, **{ASK: True})
    llm.llm_engine.add_request("streamed", {"prompt_token_ids": prompt}, params)
    parts: list[CompletionOutput] = []
    while llm.llm_engine.has_unfinished_requests():
        parts += [output.outputs[0] for output in llm.llm_engine.step()]
    assert [len(part.routed_experts) for part in parts] == [len(prompt)] + [1] * 5
    rows, weights = (
        np.concatenate([getattr(part, name) for part in parts])
        for name in ("routed_experts", "routed_experts_weights")
    )
    tokens = [*prompt, *(token for part in parts for token in part.token_ids)]
    assert_weights(model, tokens, rows, weights)


def test_preempted_requests_have_their_weights(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    preempted: list[str] = []
    tight = {"num_gpu_blocks_override": 12, "max_model_len": 256}
    with running(model, routed_experts_weights="float32", **tight) as llm:
        scheduler = scheduler_of(llm)
        preempt = scheduler._preempt_request

        def note(request: Any, *more: Any, **named: Any) -> Any:
            preempted.append(request.request_id)
            return preempt(request, *more, **named)

        monkeypatch.setattr(scheduler, "_preempt_request", note)
        prompts = [random_prompt(30 + i, 150) for i in range(2)]
        outputs = ask(llm, *prompts, **{ASK: True}, max_tokens=60)
    assert preempted
    for output in outputs:
        assert_true(model, output)


def test_offloaded_prefixes_have_their_weights(model: Path) -> None:
    """The blocks of the prompt are overwritten, and loaded again. Rows are kept for twice as many
    blocks as the cache has."""
    LOADED.clear()
    prompt = random_prompt(90, CHUNK + 2 * BLOCK + 3)
    few = {"num_gpu_blocks_override": 12, "max_model_len": 256}
    with running(model, routed_experts_weights="float32", **offloading(), **few) as llm:
        (first,) = ask(llm, prompt, **{ASK: True})
        ask(llm, *(random_prompt(91 + i, 200) for i in range(2)))
        assert not LOADED
        (loaded,) = ask(llm, [*prompt, 7, 8], **{ASK: True})
    assert len(LOADED) == 1
    assert LOADED[0] == len(prompt) // BLOCK
    assert loaded.num_cached_tokens == BLOCK * LOADED[0]
    for output in (first, loaded):
        assert_true(model, output)


def test_float16_is_the_nearest_to_float32(model: Path) -> None:
    answers = []
    for dtype in ("float32", "float16"):
        with running(model, routed_experts_weights=dtype) as llm:
            answers.append(ask(llm, random_prompt(40, 2 * CHUNK), **{ASK: True})[0].outputs[0])
    exact, rounded = answers
    np.testing.assert_array_equal(rounded.routed_experts, exact.routed_experts)
    assert rounded.routed_experts_weights.dtype == np.float16
    np.testing.assert_array_equal(
        rounded.routed_experts_weights, exact.routed_experts_weights.astype(np.float16)
    )


def test_forced_experts_come_with_the_weights_that_were_used(model: Path) -> None:
    """The weights of given experts are their scores, normalized. Those of the router's own choice
    are its own, bit for bit."""
    prompt = random_prompt(50, CHUNK + 5)
    options = {"enable_forced_routed_experts": True, "max_num_batched_tokens": 256}
    with running(model, routed_experts_weights="float32", **options) as llm:
        (own,) = (output.outputs[0] for output in ask(llm, prompt, **{ASK: True}))
        rows, weights = own.routed_experts[: len(prompt)], weights_of(own)[: len(prompt)]

        def force(rows: Array) -> CompletionOutput:
            given = {"prompt_token_ids": prompt, "forced_routed_experts": rows}
            return ask(llm, given, **{ASK: True})[0].outputs[0]

        again, reversed_order = force(rows), force(rows[..., ::-1].copy())
    np.testing.assert_array_equal(weights_of(again)[: len(prompt)], weights)
    np.testing.assert_array_equal(reversed_order.routed_experts[: len(prompt)], rows[..., ::-1])
    np.testing.assert_allclose(
        weights_of(reversed_order)[: len(prompt)], weights[..., ::-1], atol=CLOSE
    )


def test_asking_needs_the_setting(model: Path) -> None:
    from vllm.exceptions import VLLMValidationError

    with running(model) as llm:
        with pytest.raises(VLLMValidationError, match="--routed-experts-weights"):
            ask(llm, [5, 6, 7], **{ASK: True})
        (output,) = ask(llm, [5, 6, 7], **{ASK: False})
    assert output.outputs[0].routed_experts is not None


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("server") / "server.log"
    arguments = ["--enable-return-routed-experts", "--routed-experts-weights=float32"]
    with Server(model, log=log, args=arguments) as server:
        yield server


PROMPT = random_prompt(60, BLOCK + 5)
CHAT = [{"role": "user", "content": "a few words of a question"}]
BODIES: dict[str, dict[str, Any]] = {
    "/inference/v1/generate": {
        "token_ids": PROMPT,
        "sampling_params": {"max_tokens": 5, "temperature": 0.0, "ignore_eos": True},
    },
    "/v1/completions": {"prompt": PROMPT, "max_tokens": 5, "temperature": 0.0, "ignore_eos": True},
    "/v1/chat/completions": {
        "messages": CHAT,
        "max_tokens": 5,
        "temperature": 0.0,
        "ignore_eos": True,
    },
}


def send(url: str, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The answer, or the chunks of a stream."""
    reply = httpx.post(url + path, json=body, timeout=120, trust_env=False)
    reply.raise_for_status()
    if not body.get("stream"):
        return [reply.json()]
    lines = (line.removeprefix("data: ") for line in reply.text.splitlines() if line)
    return [json.loads(line) for line in lines if line != "[DONE]"]


def decode_weights(choice: dict[str, Any]) -> Array:
    return np.load(io.BytesIO(pybase64.b64decode(choice["routed_experts_weights"])))


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("path", BODIES)
def test_weights_over_http_are_true(server: Server, model: Path, path: str, stream: bool) -> None:
    body = {"model": server.checkpoint, "return_token_ids": True, **BODIES[path]}
    parts = send(server.url, path, {**body, ASK: True, "stream": stream})
    choices = [choice for part in parts for choice in part["choices"]]
    with_rows = [choice for choice in choices if choice.get("routed_experts")]
    assert len(with_rows) > 1 or not stream
    rows = np.concatenate([decode_rows(choice["routed_experts"]) for choice in with_rows])
    weights = np.concatenate([decode_weights(choice) for choice in with_rows])
    assert weights.dtype == np.float32
    prompt = parts[0].get("prompt_token_ids") or choices[0].get("prompt_token_ids") or PROMPT
    tokens = [token for choice in choices for token in choice.get("token_ids") or ()]
    assert_weights(model, [*prompt, *tokens], rows, weights)
    # Nobody else gets them.
    for more in ({}, {"return_routed_experts": True}):
        parts = send(server.url, path, {**body, **more, "stream": stream})
        assert "routed_experts_weights" not in json.dumps(parts)


# Expert parallelism is not among them: the CPU's kernel takes all experts only.
@pytest.fixture(scope="module", params=["tensor", "pipeline", "data"])
def two_workers(
    model: Path, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    """The KV cache of an engine has room for 384 tokens."""
    arguments = ["--enforce-eager", "--routed-experts-weights=float32"]
    arguments += [f"--{request.param}-parallel-size=2"]
    arguments += ["--num-gpu-blocks-override=12", "--max-model-len=256"]
    log = tmp_path_factory.mktemp(request.param) / "server.log"
    with serving(model, log, *arguments) as server:
        yield server


def complete(server: Server, prompt: list[int], **more: Any) -> tuple[list[int], Array, Array]:
    """All tokens, their ids and their weights."""
    path = "/inference/v1/generate"
    sampling = {**BODIES[path]["sampling_params"], **more.pop("sampling", {})}
    body = {"token_ids": prompt, "sampling_params": sampling, ASK: True, **more}
    choices = [choice for part in send(server.url, path, body) for choice in part["choices"]]
    with_rows = [choice for choice in choices if choice.get("routed_experts")]
    rows = np.concatenate([decode_rows(choice["routed_experts"]) for choice in with_rows])
    weights = np.concatenate([decode_weights(choice) for choice in with_rows])
    sampled = [token for choice in choices for token in choice["token_ids"]]
    return [*prompt, *sampled], rows, weights


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_weights_of_two_workers_are_true(model: Path, two_workers: Server, stream: bool) -> None:
    """The prompts are computed, and then found in the prefix cache."""
    prompts = [random_prompt(70 + 2 * stream + i, n) for i, n in enumerate((3 * CHUNK + 5, 7))]
    answers = [complete(two_workers, prompt, stream=stream) for prompt in prompts]
    before = two_workers.metric(disaggregated.CACHED) or 0
    # With data parallelism, requests take turns.
    answers += [complete(two_workers, prompts[0], stream=stream) for _ in range(2)]
    assert (two_workers.metric(disaggregated.CACHED) or 0) >= before + 3 * CHUNK
    for answer in answers:
        assert_weights(model, *answer)


def test_weights_of_two_workers_are_true_after_preemptions(
    model: Path, two_workers: Server
) -> None:
    """Two requests of each engine fit into its KV cache at first, and later only one."""
    prompts = [random_prompt(76 + i, 150) for i in range(4)]
    with ThreadPoolExecutor(len(prompts)) as pool:
        answers = list(
            pool.map(
                lambda prompt: complete(two_workers, prompt, sampling={"max_tokens": 60}), prompts
            )
        )
    assert two_workers.metric("vllm:num_preemptions_total")
    for answer in answers:
        assert_weights(model, *answer)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_weights_of_the_prompt_come_from_the_prefill_engine(
    pair: Pair, model: Path, stream: bool
) -> None:
    path, prompt = "/inference/v1/generate", random_prompt(80 + stream, 3 * BLOCK + 7)
    body = {**BODIES[path], "token_ids": prompt, ASK: True, "stream": stream}
    parts = send(pair.url, path, body)
    choices = [choice for part in parts for choice in part["choices"]]
    assert choices[0]["routed_experts_start"] == 0
    with_rows = [choice for choice in choices if choice.get("routed_experts")]
    rows = np.concatenate([decode_rows(choice["routed_experts"]) for choice in with_rows])
    weights = np.concatenate([decode_weights(choice) for choice in with_rows])
    tokens = [*prompt, *(token for choice in choices for token in choice["token_ids"])]
    assert_weights(model, tokens, rows, weights)
    assert pair.decode.metric(disaggregated.RECEIVED)


@pytest.fixture(scope="module")
def pair(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """A prefill and a decode engine that share KV through files."""
    folder = tmp_path_factory.mktemp("disaggregated")
    files = disaggregated.files(folder / "kv")

    def way(role: str) -> tuple[Sequence[str], Mapping[str, str]]:
        arguments, variables = files(role)
        return [*arguments, "--routed-experts-weights=float32"], variables

    with disaggregated.running(model, folder, way) as pair:
        yield pair
