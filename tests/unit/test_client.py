# SPDX-License-Identifier: Apache-2.0
"""The client checks what it reads. test_openai.py tests it with a server."""

from __future__ import annotations

import base64
import pickle
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from examples import client
from examples.client import Completion, RoutedExpertsError, decode_rows, join
from tests.clients.driving import encode
from tests.stub import Stub

PROMPT, SAMPLED = [5, 6, 7, 8], [9, 10, 11]
LAYERS, TOP_K = 3, 2
MOE_LAYERS = [0, 2]


def make_rows(count: int, dtype: type = np.uint8) -> np.ndarray:
    """Rows whose values show their position; the dense layer is zero."""
    rows = np.zeros((count, LAYERS, TOP_K), dtype)
    for layer in MOE_LAYERS:
        rows[:, layer] = np.arange(count)[:, None] * 10 + [layer + 1, layer + 2]
    return rows


def make_choice(rows: np.ndarray, **changes: Any) -> dict[str, Any]:
    return {
        "index": 0,
        "token_ids": SAMPLED,
        "finish_reason": "length",
        "routed_experts": encode(rows),
        "routed_experts_start": 0,
        "moe_layers": MOE_LAYERS,
        "num_prompt_tokens": len(PROMPT),
        "logprobs": {"content": [{"token": "", "logprob": -i / 4} for i in range(len(SAMPLED))]},
        **changes,
    }


def read(choice: dict[str, Any]) -> Completion:
    (completion,) = join(PROMPT, [{"choices": [choice]}])
    return completion


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
def test_rows_are_decoded_with_shape_and_dtype(dtype: type) -> None:
    rows = make_rows(6, dtype)
    decoded = decode_rows(encode(rows))
    assert decoded.dtype == dtype
    np.testing.assert_array_equal(decoded, rows)


NO_ROWS = {
    "no base64": "not base64!",
    "no file": base64.b64encode(b"no array").decode(),
    "pickle": base64.b64encode(pickle.dumps([1, 2])).decode(),
    "objects": encode(np.array([[[{}]]], dtype=object)),
    "archive": encode(make_rows(6), np.savez),
    "cut short": encode(make_rows(6))[:-8],
    "more": base64.b64encode(base64.b64decode(encode(make_rows(6))) + b"\0").decode(),
    "int32": encode(make_rows(6).astype(np.int32)),
    "big-endian": encode(make_rows(6).astype(">u2")),
    "two axes": encode(make_rows(6)[0]),
    "empty": "",
}


@pytest.mark.parametrize("value", NO_ROWS.values(), ids=NO_ROWS)
def test_anything_but_an_array_of_small_ids_is_an_error(value: str) -> None:
    with pytest.raises(RoutedExpertsError, match=r"^routed_experts is ") as error:
        decode_rows(value)
    assert "\n" not in str(error.value)


def test_answer_is_read_with_all_its_fields() -> None:
    completion = read(make_choice(make_rows(6)))
    np.testing.assert_array_equal(completion.rows, make_rows(6))
    assert completion == replace(completion, prompt=(5, 6, 7, 8), token_ids=(9, 10, 11))
    assert completion.logprobs == (0.0, -0.25, -0.5)
    assert completion.start == 0
    assert completion.moe_layers == (0, 2)
    assert completion.finish_reason == "length"


@pytest.mark.parametrize(("start", "prompt_rows"), [(0, 4), (3, 1), (4, 0), (5, 0)])
def test_rows_are_split_where_the_prompt_ends(start: int, prompt_rows: int) -> None:
    rows = make_rows(8)[start:]
    choice = make_choice(rows, routed_experts_start=start, token_ids=[9] * 5, logprobs=None)
    completion = read(choice)
    np.testing.assert_array_equal(completion.prompt_rows, rows[:prompt_rows])
    np.testing.assert_array_equal(completion.generation_rows, rows[prompt_rows:])


def test_layers_have_as_many_experts_as_they_take() -> None:
    completion = read(make_choice(make_rows(6), moe_top_k=[1, 2]))
    assert completion.moe_top_k == (1, 2)
    first, second = completion.by_layer().values()
    np.testing.assert_array_equal(first, make_rows(6)[:, 0, :1])
    np.testing.assert_array_equal(second, make_rows(6)[:, 2])


def test_chunks_of_a_stream_join_to_the_whole_answer() -> None:
    rows = make_rows(6)
    chunks = []
    for count in range(1, len(SAMPLED) + 1):
        span = slice(0 if count == 1 else count + 2, count + 3)
        for index in (1, 0):
            chunk = make_choice(
                rows[span] + index * (rows[span] > 0).astype(np.uint8),
                index=index,
                token_ids=SAMPLED[count - 1 : count],
                routed_experts_start=span.start,
                logprobs=None,
                finish_reason="length" if count == len(SAMPLED) else None,
            )
            chunks.append({"choices": [chunk]})
    # A chunk with no choice (usage), and a choice without anything new.
    chunks[2:2] = [
        {"choices": []},
        {"choices": [{"index": 0, "token_ids": [], "finish_reason": None}]},
    ]
    completions = join(PROMPT, chunks)
    for index, completion in enumerate(completions):
        whole = read(make_choice(rows + index * (rows > 0).astype(np.uint8), logprobs=None))
        np.testing.assert_array_equal(completion.rows, whole.rows)
        assert replace(completion, rows=whole.rows) == whole
    assert len(completions) == 2


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"routed_experts": None}, "has no routed_experts"),
        ({"routed_experts": encode(make_rows(5))}, "5 rows; 4 prompt and 3 sampled .* make 6"),
        ({"routed_experts": encode(make_rows(7))}, "7 rows; 4 prompt and 3 sampled .* make 6"),
        ({"routed_experts_start": 1}, "6 rows; .* from position 1 make 5"),
        ({"routed_experts_start": -1, "routed_experts": encode(make_rows(7))}, "position -1 make"),
        ({"routed_experts_start": "0"}, "cannot be read"),
        ({"moe_layers": []}, r"moe_layers is \[\]"),
        ({"moe_layers": [2, 0]}, r"moe_layers is \[2, 0\]"),
        ({"moe_layers": [0, 0, 2]}, r"moe_layers is \[0, 0, 2\]"),
        ({"moe_layers": [0, 3]}, "below 3"),
        ({"moe_layers": [-1, 0]}, r"moe_layers is \[-1, 0\]"),
        ({"moe_layers": [0]}, r"that moe_layers \[0\] leaves out"),
        ({"moe_layers": None}, "moe_layers"),
        ({"moe_top_k": [2]}, r"moe_top_k is \[2\]; wanted numbers up to 2 for 2 layers"),
        ({"moe_top_k": [0, 2]}, r"moe_top_k is \[0, 2\]"),
        ({"moe_top_k": [2, 3]}, r"moe_top_k is \[2, 3\]"),
        ({"moe_top_k": [1, 1]}, r"moe_top_k is \[1, 1\]"),
        ({"moe_top_k": 2}, "cannot be read"),
        ({"num_prompt_tokens": 3}, "num_prompt_tokens is 3; wanted 4"),
        ({"num_prompt_tokens": None}, "num_prompt_tokens is None; wanted 4"),
        ({"logprobs": {"content": []}, "token_ids": None}, "6 rows; 4 prompt and 0 sampled"),
        ({"logprobs": {"content": [{"logprob": 0.0}]}}, "3 tokens but 1 log-probs"),
    ],
    ids=str,
)
def test_answer_without_the_rows_it_owes_is_an_error(changes: dict[str, Any], told: str) -> None:
    with pytest.raises(RoutedExpertsError, match=told):
        read(make_choice(make_rows(6), **changes))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("routed_experts_start", 4),
        ("routed_experts_start", 6),
        ("moe_layers", [0]),
        ("moe_top_k", [1, 2]),
        ("num_prompt_tokens", 5),
        ("routed_experts", encode(make_rows(2)[..., :1])),
        ("routed_experts", encode(make_rows(2, np.uint16))),
    ],
)
def test_chunks_that_do_not_join_are_an_error(field: str, value: Any) -> None:
    first = make_choice(make_rows(5), token_ids=SAMPLED[:1], logprobs=None)
    second = make_choice(
        make_rows(7)[5:], token_ids=SAMPLED[1:], logprobs=None, routed_experts_start=5
    )
    chunks = [{"choices": [first]}, {"choices": [second | {field: value}]}]
    with pytest.raises(RoutedExpertsError, match=r"wanted|do not join"):
        join(PROMPT, chunks)


def split_weights(weights: np.ndarray) -> list[dict[str, Any]]:
    """Two chunks of a stream with rows, and with parts of `weights`."""
    rows = make_rows(6)
    parts = []
    for span, tokens in ((slice(0, 4), SAMPLED[:1]), (slice(4, 6), SAMPLED[1:])):
        choice = make_choice(rows[span], token_ids=tokens, logprobs=None)
        choice["routed_experts_start"] = span.start
        choice["routed_experts_weights"] = encode(weights[span])
        parts.append({"choices": [choice]})
    return parts


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_weights_come_with_their_rows(dtype: type) -> None:
    weights = np.random.default_rng(0).random(make_rows(6).shape).astype(dtype)
    whole = read(make_choice(make_rows(6), routed_experts_weights=encode(weights)))
    (streamed,) = join(PROMPT, split_weights(weights))
    for completion in (whole, streamed):
        assert completion.weights is not None
        assert completion.weights.dtype == dtype
        np.testing.assert_array_equal(completion.weights, weights)
    assert read(make_choice(make_rows(6))).weights is None


@pytest.mark.parametrize(
    ("weights", "told"),
    [
        (encode(np.ones((5, 3, 2), np.float32)), r"shape \(5, 3, 2\); wanted \(6, 3, 2\)"),
        (encode(np.ones((6, 3, 1), np.float32)), r"shape \(6, 3, 1\); wanted \(6, 3, 2\)"),
        (encode(np.ones((6, 3, 2))), "routed_experts_weights is float64"),
        (encode(make_rows(6)), "routed_experts_weights is uint8"),
        ("not base64!", "routed_experts_weights is not base64"),
    ],
)
def test_weights_of_another_form_are_an_error(weights: str, told: str) -> None:
    with pytest.raises(RoutedExpertsError, match=told):
        read(make_choice(make_rows(6), routed_experts_weights=weights))


def test_chunk_with_rows_but_without_weights_is_an_error() -> None:
    chunks = split_weights(np.ones(make_rows(6).shape, np.float32))
    del chunks[1]["choices"][0]["routed_experts_weights"]
    with pytest.raises(RoutedExpertsError, match="have weights, and some have none"):
        join(PROMPT, chunks)


def test_aborted_answer_may_have_fewer_rows() -> None:
    choice = make_choice(make_rows(5), finish_reason="abort")
    assert len(read(choice).rows) == 5
    with pytest.raises(RoutedExpertsError, match="7 rows"):
        read({**choice, "routed_experts": encode(make_rows(7))})


def test_request_asks_for_rows_from_a_start() -> None:
    choice = make_choice(make_rows(6)[2:], routed_experts_start=2)
    with Stub({"choices": [choice]}).running() as server:
        params = {"max_tokens": 3, "extra_args": {"other": 1}}
        (completion,) = client.generate(server.url, PROMPT, params, start=2)
    assert completion.start == 2
    asks = {"return_routed_experts": True, "routed_experts_prompt_start": 2}
    params["extra_args"] = {"other": 1, **asks}
    body = {"token_ids": PROMPT, "stream": False, "sampling_params": params}
    assert server.sent == [{"path": client.PATH, **body}]


@pytest.mark.parametrize(
    ("status", "body", "stream", "told"),
    [
        (400, '{"error": "max_tokens is -1"}', False, "answered 400: .*max_tokens is -1"),
        (200, "<html>", False, "no answer that can be read"),
        (200, '{"choices"', True, "no answer that can be read"),
        (200, 'data: {"choices": []}\n\n', True, "the stream broke off"),
        (200, 'data: {"error": {"message": "gone"}}\n\ndata: [DONE]\n\n', True, "gone"),
        (200, '{"choices": []}', False, "has 0 choices; wanted 1"),
        (200, "[]", False, "cannot be read"),
    ],
)
def test_every_bad_answer_is_told_in_one_sentence(
    status: int, body: str, stream: bool, told: str
) -> None:
    with Stub(body, status).running() as server, pytest.raises(RoutedExpertsError, match=told):
        client.generate(server.url, PROMPT, {}, stream=stream)


@pytest.mark.parametrize(
    ("n", "start", "told"), [(2, 0, "has 1 choices; wanted 2"), (1, 3, "start at position 2")]
)
def test_answer_to_another_question_is_an_error(n: int, start: int, told: str) -> None:
    choice = make_choice(make_rows(6)[2:], routed_experts_start=2)
    with (
        Stub({"choices": [choice]}).running() as server,
        pytest.raises(RoutedExpertsError, match=told),
    ):
        client.generate(server.url, PROMPT, {"n": n}, start=start)
