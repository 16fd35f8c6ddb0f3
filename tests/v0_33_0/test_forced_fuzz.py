# SPDX-License-Identifier: Apache-2.0
"""Any value of the fields of forced experts is computed or HTTP 400, and harms nobody."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, seed
from hypothesis import strategies as st

from harness.server import Server
from tests.behaviour.conftest import random_prompt
from tests.behaviour.fuzz.requests import BODIES, FUZZ, JSON, SEED, post
from tests.behaviour.test_endpoints import find_errors
from tests.behaviour.test_layouts import serving
from tests.v0_33_0.test_forced_routed_experts import EXPERTS, LAYERS, TOP_K, encode

pytestmark = pytest.mark.slow

ROWS, START = "forced_routed_experts", "forced_routed_experts_start"
DTYPES = ("uint8", "uint16", "int16", "int32", "int64", "float32", "bool", ">u2")


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("server") / "server.log"
    arguments = ["--enable-forced-routed-experts", "--max-model-len=64", "--enforce-eager"]
    with serving(model, log, *arguments, cores="0") as server:
        yield server


def make_text(length: int, layers: int, top_k: int, dtype: str, wrong: int | None) -> str:
    """A file of rows, whose last id is perhaps wrong."""
    scores = np.random.default_rng(length).random((length, layers, EXPERTS))
    rows = scores.argsort(-1)[..., :top_k]
    if wrong is not None and rows.size:
        rows[-1, -1, -1] = wrong
    return encode(rows.astype(dtype))


def damage(text: str, at: int, bits: int, end: int | None) -> str:
    file = bytearray(base64.b64decode(text))
    file[at % len(file)] ^= bits
    return base64.b64encode(file[:end]).decode()


RIGHT = {"length": 5, "layers": LAYERS, "top_k": TOP_K, "dtype": "uint8", "wrong": None}
# Each is enough for a refusal.
WRONG: list[dict[str, Any]] = [
    {"length": 90},
    {"layers": LAYERS + 1},
    {"layers": 0},
    {"top_k": 1},
    {"dtype": "int64"},
    {"dtype": "float32"},
    {"wrong": EXPERTS},
    {"wrong": 255},
    {"wrong": -1, "dtype": "int16"},
]
OTHERS: list[dict[str, Any]] = [{}, {"length": 0}, {"wrong": 0}, *({"dtype": d} for d in DTYPES)]
TEXTS = st.sampled_from(WRONG + OTHERS).map(lambda change: make_text(**{**RIGHT, **change}))
DAMAGED = st.builds(
    damage,
    TEXTS,
    st.integers(0, 400),
    st.integers(0, 255),
    st.none() | st.integers(0, 300),
)
STARTS = (
    st.none() | st.integers(-1, 9) | st.sampled_from([None, 2**63, 2**70, 1.0, True, "1"]) | JSON
)


@pytest.mark.parametrize("path", BODIES)
def test_values_of_any_kind_are_computed_or_refused(server: Server, path: str) -> None:
    probe = random_prompt(2, 9)
    before = server.generate(probe, max_tokens=3)
    seen = set()

    @seed(SEED)
    @FUZZ
    @given(rows=TEXTS | DAMAGED | JSON, start=STARTS, stream=st.booleans())
    def send(rows: object, start: object, stream: bool) -> None:
        body = {"model": server.checkpoint, **BODIES[path], ROWS: rows, START: start}
        if stream:
            body["stream"] = True
        status, text = post(server, path, json.dumps(body))
        assert status in (200, 400), (rows, start, text[:500])
        if status == 400 and ROWS in text:
            message = json.loads(text)["error"]["message"]
            assert len(message) < 800, message
        seen.add(status)

    send()
    for change in ({}, *WRONG):
        body = {"model": server.checkpoint, **BODIES[path]}
        body[ROWS] = make_text(**{**RIGHT, **change})
        status, text = post(server, path, json.dumps(body))
        assert status == (400 if change else 200), (change, text[:500])
    assert seen == {200, 400}
    after = server.generate(probe, max_tokens=3)
    assert after.token_ids == before.token_ids
    assert (after.rows == before.rows).all()


def test_log_names_no_error(server: Server) -> None:
    """After all requests of this module."""
    assert find_errors(server) == []
