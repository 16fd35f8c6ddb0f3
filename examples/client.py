# SPDX-License-Identifier: Apache-2.0
"""A trainer's client: sampled tokens, their log-probs and their routed experts.

    completions = generate("http://127.0.0.1:8000", prompt, {"max_tokens": 64, "n": 8})

One file to copy; it needs only numpy. It checks everything that the server sends, so that rows
which are missing, shifted or malformed never reach a trainer.
"""

from __future__ import annotations

import binascii
import http.client
import io
import json
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

try:
    # Decodes answers of many MB thirty times as fast. vLLM itself needs this package.
    from pybase64 import b64decode
except ImportError:
    from base64 import b64decode  # type: ignore[assignment]

PATH = "/inference/v1/generate"

# (rows, layers, top-k): the experts that tokens chose.
Rows = npt.NDArray[np.uint8 | np.uint16]
# (rows, layers, top-k): the weights that these experts had.
Weights = npt.NDArray[np.float32 | np.float16]


class RoutedExpertsError(ValueError):
    """The server gave no answer, or wrong or missing rows; the text says which, in one sentence."""


@dataclass(frozen=True)
class Completion:
    """One choice of an answer, for P prompt tokens and O returned ones.

    Attributes:
        prompt: P ids, as sent.
        token_ids: O ids, as sampled.
        logprobs: O floats, natural logarithms of the probabilities that the server
            sampled with at temperature 1; empty if none were asked for.
        rows: (P + O - 1 - start, L, K) uint8 or uint16: the K experts that the tokens at
            positions `start` to P + O - 2 took in each of L decoder layers. The last
            sampled token was never processed and has no row.
        start: position of the first row.
        moe_layers: the decoder layers that route, ascending; rows of all others are zero.
        finish_reason: "stop", "length" or "abort". An aborted completion may have fewer
            rows: only its first positions have rows then.
        moe_top_k: how many experts each of `moe_layers` takes, if they differ. These are the first
            ids of its rows; the last one is repeated after them. None if each takes K.
        weights: the weight that the router gave each expert of `rows`, in the same shape, float32
            or float16. None unless `sampling_params` asked for them.
    """

    prompt: tuple[int, ...]
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    rows: Rows
    start: int
    moe_layers: tuple[int, ...]
    finish_reason: str | None = None
    moe_top_k: tuple[int, ...] | None = None
    weights: Weights | None = None

    @property
    def prompt_rows(self) -> Rows:
        """Rows of the prompt's tokens, from position `start` to P - 1."""
        return self.rows[: max(0, len(self.prompt) - self.start)]

    @property
    def generation_rows(self) -> Rows:
        """Rows of the sampled tokens, from position P on (or `start`, if that is later)."""
        return self.rows[max(0, len(self.prompt) - self.start) :]

    def by_layer(self) -> dict[int, Rows]:
        """For each MoE layer, by its index among all decoder layers: (rows, k), the k
        experts that it takes, each once."""
        top_k = self.moe_top_k or [self.rows.shape[2]] * len(self.moe_layers)
        pairs = zip(self.moe_layers, top_k, strict=True)
        return {layer: self.rows[:, layer, :k] for layer, k in pairs}


def generate(
    url: str,
    prompt: Sequence[int],
    sampling_params: Mapping[str, Any],
    *,
    start: int = 0,
    stream: bool = False,
    timeout_s: float = 600.0,
) -> list[Completion]:
    """Complete a prompt and get the rows of its tokens.

    Args:
        url: of the server, without a path.
        prompt: P token ids.
        sampling_params: fields of vLLM's `SamplingParams`, for example `max_tokens`, `n`,
            `seed` and `logprobs`. With `return_routed_experts_weights` (vLLM v0.33.0), the
            completions have weights.
        start: position of the first row wanted, 0 to P. Skip rows that you have already.
        stream: whether the answer comes in chunks, as tokens are sampled. The result is
            the same.
        timeout_s: longest silence of the server.

    Returns:
        One completion for each of the `n` choices, in the order of their index.

    Raises:
        RoutedExpertsError: no answer, an error, or an answer with wrong or missing rows.
    """
    extra_args = {"return_routed_experts": True, "routed_experts_prompt_start": start}
    extra_args = {**(sampling_params.get("extra_args") or {}), **extra_args}
    body = {
        "token_ids": list(prompt),
        "sampling_params": {**sampling_params, "extra_args": extra_args},
        "stream": stream,
    }
    request = urllib.request.Request(
        url + PATH, json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    try:
        with _direct.open(request, timeout=timeout_s) as reply:
            chunks = list(_events(reply)) if stream else [json.load(reply)]
    except urllib.error.HTTPError as e:
        detail = e.read().decode(errors="replace")[:500]
        raise RoutedExpertsError(f"the server answered {e.code}: {detail}") from e
    except RoutedExpertsError:
        raise
    except (OSError, http.client.HTTPException, ValueError) as e:
        raise RoutedExpertsError(
            f"the server gave no answer that can be read: {getattr(e, 'reason', e)}"
        ) from e
    completions = join(prompt, chunks)
    wanted = sampling_params.get("n") or 1
    if len(completions) != wanted:
        raise RoutedExpertsError(f"the answer has {len(completions)} choices; wanted {wanted}")
    # A later start is allowed: earlier rows may not exist (prompt KV from another engine).
    if early := [c.start for c in completions if c.start < start]:
        raise RoutedExpertsError(f"rows start at position {early[0]}; asked for {start}")
    return completions


def join(prompt: Sequence[int], chunks: Iterable[Mapping[str, Any]]) -> list[Completion]:
    """Read an answer: a whole one, or the chunks of a stream in their order.

    Args:
        prompt: P token ids, as sent.
        chunks: each with a list `choices`.

    Returns:
        One completion for each choice, in the order of their index.

    Raises:
        RoutedExpertsError: missing or malformed fields, rows that do not join, or a number of rows
            other than P + O - 1 - start.
    """
    parts: dict[int, list[Mapping[str, Any]]] = {}
    try:
        for chunk in chunks:
            if "error" in chunk:
                raise RoutedExpertsError(f"the stream ended with an error: {chunk['error']}")
            for choice in chunk["choices"]:
                parts.setdefault(int(choice["index"]), []).append(choice)
        return [_complete(prompt, parts[index]) for index in sorted(parts)]
    except (KeyError, TypeError, AttributeError) as e:
        raise RoutedExpertsError(f"the answer cannot be read: {type(e).__name__}: {e}") from e


def decode_rows(text: str) -> Rows:
    """Decode the field `routed_experts`: base64 of a `.npy` file.

    Args:
        text: the field's value.

    Returns:
        (rows, layers, top-k) array, uint8 or uint16.

    Raises:
        RoutedExpertsError: not base64, not a `.npy`, pickled, or of another shape or dtype.
    """
    return _decode(text, "routed_experts", np.uint8, np.uint16)


def decode_weights(text: str) -> Weights:
    """Decode the field `routed_experts_weights`, as `decode_rows` does: float32 or float16."""
    return _decode(text, "routed_experts_weights", np.float32, np.float16)


def _decode(text: str, field: str, *dtypes: type[np.generic]) -> npt.NDArray[Any]:
    """Decode a field that has a (rows, layers, top-k) array of one of the dtypes."""
    try:
        data = io.BytesIO(b64decode(text, validate=True))
        # Never unpickle: that would run code from the server.
        rows = np.load(data, allow_pickle=False)
    except binascii.Error as e:
        raise RoutedExpertsError(f"{field} is not base64: {e}") from e
    except (ValueError, EOFError, OSError, MemoryError) as e:
        raise RoutedExpertsError(f"{field} is no .npy file of numbers: {e}") from e
    # `numpy.load` reads archives of arrays too.
    if not isinstance(rows, np.ndarray) or data.read(1):
        raise RoutedExpertsError(f"{field} is not one .npy file")
    if rows.ndim != 3 or rows.dtype not in dtypes:
        wanted = " or ".join(dtype.__name__ for dtype in dtypes)
        raise RoutedExpertsError(
            f"{field} is {rows.dtype} of shape {rows.shape}; "
            f"wanted {wanted} of shape (rows, layers, top-k)"
        )
    return rows


def _complete(prompt: Sequence[int], parts: Sequence[Mapping[str, Any]]) -> Completion:
    """Join the parts of one choice, and check that its rows are those of its tokens."""
    token_ids = [t for part in parts for t in part["token_ids"] or ()]
    logprobs = [
        token["logprob"]
        for part in parts
        for token in (part.get("logprobs") or {}).get("content") or ()
    ]
    if logprobs and len(logprobs) != len(token_ids):
        raise RoutedExpertsError(
            f"the answer has {len(token_ids)} tokens but {len(logprobs)} log-probs"
        )
    finish_reason = parts[-1].get("finish_reason")

    routed = [part for part in parts if part.get("routed_experts") is not None]
    if not routed:
        if finish_reason == "abort":
            raise RoutedExpertsError("the request was aborted before it had rows: send it again")
        raise RoutedExpertsError(
            "the answer has no routed_experts: start the server with --enable-return-routed-experts"
        )
    start, layers = routed[0]["routed_experts_start"], routed[0]["moe_layers"]
    top_k = routed[0].get("moe_top_k")
    rows, weights = _join(prompt, routed)
    wanted = len(prompt) + len(token_ids) - 1 - start
    aborted = finish_reason == "abort"
    if start < 0 or not (len(rows) == wanted or (aborted and len(rows) < wanted)):
        raise RoutedExpertsError(
            f"the answer has {len(rows)} rows; {len(prompt)} prompt and {len(token_ids)} "
            f"sampled tokens from position {start} make {wanted}"
        )
    if not layers or layers != sorted({*layers} & {*range(rows.shape[1])}):
        raise RoutedExpertsError(
            f"moe_layers is {layers}; wanted ascending numbers below {rows.shape[1]}"
        )
    most = rows.shape[2]
    if top_k is not None and (
        len(top_k) != len(layers) or {*top_k} - {*range(1, most + 1)} or most not in top_k
    ):
        raise RoutedExpertsError(
            f"moe_top_k is {top_k}; wanted numbers up to {most} for {len(layers)} layers"
        )
    if np.delete(rows, layers, axis=1).any():
        raise RoutedExpertsError(f"rows name experts in layers that moe_layers {layers} leaves out")
    return Completion(
        prompt=tuple(prompt),
        token_ids=tuple(token_ids),
        logprobs=tuple(logprobs),
        rows=rows,
        start=start,
        moe_layers=tuple(layers),
        finish_reason=finish_reason,
        moe_top_k=top_k and tuple(top_k),
        weights=weights,
    )


def _join(
    prompt: Sequence[int], routed: Sequence[Mapping[str, Any]]
) -> tuple[Rows, Weights | None]:
    """The rows of all parts, joined in order, and their weights: None if no part has any."""
    start, layers = routed[0]["routed_experts_start"], routed[0]["moe_layers"]
    top_k = routed[0].get("moe_top_k")
    pieces: list[Rows] = []
    weighed = [part for part in routed if part.get("routed_experts_weights") is not None]
    if len(weighed) not in (0, len(routed)):
        raise RoutedExpertsError("some chunks with rows have weights, and some have none")
    for part in routed:
        end = start + sum(map(len, pieces))
        if part["num_prompt_tokens"] != len(prompt):
            raise RoutedExpertsError(
                f"num_prompt_tokens is {part['num_prompt_tokens']}; wanted {len(prompt)}, as sent"
            )
        if part.get("moe_top_k") != top_k:
            raise RoutedExpertsError(
                f"moe_top_k is {part.get('moe_top_k')}; wanted {top_k}, as in the chunk before"
            )
        if part["routed_experts_start"] != end or part["moe_layers"] != layers:
            raise RoutedExpertsError(
                f"rows of moe_layers {part['moe_layers']} start at position "
                f"{part['routed_experts_start']}; wanted {layers} from position {end}"
            )
        pieces.append(decode_rows(part["routed_experts"]))
        if (pieces[-1].shape[1:], pieces[-1].dtype) != (pieces[0].shape[1:], pieces[0].dtype):
            raise RoutedExpertsError(
                f"rows of shape {pieces[0].shape} and {pieces[-1].shape}, {pieces[0].dtype} and "
                f"{pieces[-1].dtype}, do not join"
            )
    rows = np.concatenate(pieces)
    weights = None
    if weighed:
        weights = np.concatenate([decode_weights(p["routed_experts_weights"]) for p in weighed])
        if weights.shape != rows.shape:
            raise RoutedExpertsError(
                f"the weights have shape {weights.shape}; wanted {rows.shape}, as rows have"
            )
    return rows, weights


def _events(lines: Iterable[bytes]) -> Iterator[Any]:
    """The JSON values of a stream of server-sent events."""
    for line in lines:
        data = line.strip().removeprefix(b"data: ")
        if data == b"[DONE]":
            return
        if data:
            yield json.loads(data)
    raise RoutedExpertsError("the stream broke off")


# Rollout servers are in the same network: ignore a proxy of the environment.
_direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
