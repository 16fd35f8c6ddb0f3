# SPDX-License-Identifier: Apache-2.0
"""The property test of the connector finds what the release gets wrong, and nothing else."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.real import PROJECT

LINE = Path(__file__).parent.name
PRISTINE = PROJECT.root / "build" / LINE / "pristine" / "site"
TEST = Path(__file__).with_name("test_connector.py")
NAME = "test_every_request_gets_exactly_its_rows"
# What fails first is enough.
OPTIONS = ["--tb=short", "--hypothesis-profile=unshrunk"]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not PRISTINE.is_dir(), reason=f"no pristine build: make demo-pristine ON={LINE}"
    ),
]


def run(setup: str) -> tuple[int, str]:
    """Exit status and output of the property test on the release."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", f"{TEST}::{NAME}[{setup}]", *OPTIONS],
        cwd=PROJECT.root,
        env={**os.environ, "PYTHONPATH": str(PRISTINE)},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=False,
    )
    return done.returncode, done.stdout


@pytest.mark.parametrize(
    ("setup", "why"),
    [
        ("weights without a reset", "Arrays are not equal"),
        ("resets with a step in flight", "auxiliary output "),
        ("failed loads", "auxiliary output capture moved backwards"),
        ("asynchronous sessions", "auxiliary output capture moved backwards"),
    ],
)
def test_the_release_fails_where_the_series_mends_it(setup: str, why: str) -> None:
    status, said = run(setup)
    assert status == 1, said
    assert why in said


@pytest.mark.parametrize("setup", ["synchronous", "asynchronous drafts", "KV connector"])
def test_the_release_passes_elsewhere(setup: str) -> None:
    status, said = run(setup)
    assert status == 0, said
