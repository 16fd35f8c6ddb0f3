# SPDX-License-Identifier: Apache-2.0
"""Answers and router logits of a layout, and the two comparisons."""

from __future__ import annotations

import json
import pickle
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np

from examples.client import Completion
from gpu.layouts.cells import LENGTHS, OPTIONS, asks, make_prompts

MARGIN = 0.1


class Failed(Exception):
    """The cell's engines did not do what was asked."""


def save_answer(scratch: Path, index: int, answer: Completion) -> None:
    (scratch / f"answer-{index}.pickle").write_bytes(pickle.dumps(answer))


def read_answers(scratch: Path) -> dict[int, Completion]:
    return {
        index: pickle.loads((scratch / f"answer-{index}.pickle").read_bytes())
        for index in range(len(LENGTHS))
    }


# By prompt, then layer: (positions, experts) float32, NaN where nothing was recorded.
Logits = dict[int, dict[int, Any]]


def gather_logits(scratch: Path) -> tuple[Logits, bool]:
    """Merge the records of all ranks; also returns whether EPLB moved experts."""
    by_first = {prompt[0]: i for i, prompt in enumerate(make_prompts())}
    groups: dict[tuple[str, int], dict[tuple[int, int], Any]] = defaultdict(dict)
    moved = False
    for file in sorted(scratch.glob("logits*.npz")):
        data = dict(np.load(file))
        meta = json.loads(str(data.pop("meta")))
        moved |= meta["moved"]
        ranks = meta["ranks"]
        groups[(file.name.split("-")[0], ranks["dp"])][(ranks["pp"], ranks["tp"])] = (meta, data)
    if not groups:
        raise Failed("no rank recorded anything")
    logits: Logits = defaultdict(dict)
    for members in groups.values():
        steps = next(iter(members.values()))[0]["steps"]
        assert all(meta["steps"] == steps for meta, _ in members.values())
        for number, step in enumerate(steps):
            layers = {
                int(k.split("/")[1])
                for _, data in members.values()
                for k in data
                if k.startswith(f"{number}/") and not k.endswith("positions")
            }
            positions = next(iter(members.values()))[1][f"{number}/positions"]
            for layer in layers:
                parts = [
                    data[f"{number}/{layer}"]
                    for _, (_, data) in sorted(members.items())
                    if f"{number}/{layer}" in data
                ]
                # Each tensor parallel rank has all tokens, or its chunk of them.
                whole = parts[0]
                if len(whole) < len(positions):
                    whole = np.concatenate(parts)[: len(positions)]
                # Rows behind the batch are padding.
                if np.isnan(whole[: step["starts"][-1]]).any():
                    raise Failed(f"layer {layer}: the model gave logits that are no numbers")
                for prompt, begin, end in zip(
                    step["first"], step["starts"], step["starts"][1:], strict=False
                ):
                    index = by_first[prompt]
                    table = logits[index].setdefault(
                        layer,
                        np.full((OPTIONS["max_model_len"], whole.shape[1]), np.nan, np.float32),
                    )
                    table[positions[begin:end]] = whole[begin:end]
    return logits, moved


def check_own_logits(answers: dict[int, Completion], logits: Logits) -> int:
    """Check that every row is the top-k of its ranks' logits. Returns the number of decisions."""
    decisions = 0
    for index, answer in answers.items():
        if not len(answer.rows):
            continue
        for layer in answer.moe_layers:
            rows = answer.rows[:, layer].astype(np.int64)
            own = logits[index][layer][: len(rows)]
            if np.isnan(own).any():
                raise Failed(f"prompt {index}, layer {layer}: tokens without recorded logits")
            chosen = np.sort(np.take_along_axis(own, rows, 1), 1)
            greatest = np.sort(own, 1)[:, -rows.shape[1] :]
            wrong = ~np.isclose(chosen, greatest, rtol=1e-6, atol=1e-6).all(1)
            if wrong.any():
                raise Failed(
                    f"prompt {index}, layer {layer}: {wrong.sum()} of {len(rows)} rows are not "
                    f"the top-k of their logits, first at position {wrong.argmax()}"
                )
            decisions += len(rows)
    return decisions


def check_answers(answers: dict[int, Completion], num_layers: int, tokens: int) -> int:
    """Check that exactly the asking prompts have all rows, of distinct experts. Returns their
    number."""
    count = 0
    for index, answer in answers.items():
        if not asks(index):
            if len(answer.rows):
                raise Failed(f"prompt {index} did not ask and got rows")
            continue
        if not len(answer.rows):
            raise Failed(f"prompt {index} asked and got no rows")
        wanted = LENGTHS[index] + tokens - 1
        if answer.start or len(answer.rows) != wanted:
            raise Failed(f"prompt {index}: {len(answer.rows)} rows from {answer.start}")
        if answer.moe_layers != tuple(range(num_layers)) or answer.rows.shape[1] != num_layers:
            raise Failed(f"prompt {index}: layers {answer.moe_layers} of {num_layers}")
        if not (np.diff(np.sort(answer.rows.astype(int), axis=2), axis=2) > 0).all():
            raise Failed(f"prompt {index}: an expert twice in one row")
        count += wanted
    return count


def check_reference(
    answers: dict[int, Completion], reference: dict[int, Completion], logits: Logits
) -> dict[str, Any]:
    """Compare rows with those of one GPU, as far as the tokens are equal. `logits` are those of the
    one GPU."""
    decisions = differ = first = 0
    worst = 0.0
    for index, answer in answers.items():
        if not len(answer.rows):
            continue
        pairs = zip(answer.token_ids, reference[index].token_ids, strict=False)
        same = next((i for i, (a, b) in enumerate(pairs) if a != b), len(answer.token_ids))
        length = min(LENGTHS[index] + same, len(answer.rows), len(reference[index].rows))
        got = np.sort(answer.rows[:length].astype(int), 2)
        want = np.sort(reference[index].rows[:length].astype(int), 2)
        wrong = (got != want).any(2)
        decisions += wrong.size
        differ += int(wrong.sum())
        for position, layer in zip(*wrong.nonzero(), strict=True):
            # A difference in an earlier layer, here or at an earlier position, causes later ones.
            if wrong[: position + 1, :layer].any():
                continue
            first += 1
            ordered = np.sort(logits[index][int(layer)][position])
            k = got.shape[2]
            worst = max(worst, float(ordered[-k] - ordered[-k - 1]))
    if worst >= MARGIN:
        raise Failed(f"differs from one GPU at a margin of {worst:.3g}, {first} first differences")
    return {
        "against_one": decisions,
        "differ": differ,
        "first_differ": first,
        "greatest_margin": worst,
    }
