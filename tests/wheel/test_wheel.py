# SPDX-License-Identifier: Apache-2.0
"""The real CPU wheel: reproducible and verified."""

import shutil
from pathlib import Path

import pytest

from tests.real import PROJECT, need, need_source, real_series
from tools.common.pin import Project
from tools.series.apply import apply_series
from tools.wheel.build import build_wheel
from tools.wheel.verify import verify_wheel

CPU = PROJECT.pin.wheels["cpu"]


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    series = real_series()
    need_source()
    need(CPU.file)
    path = tmp_path_factory.mktemp("wheel") / "vllm"
    apply_series(Project(PROJECT.root, PROJECT.line, path), series)
    return path


def build(tree: Path, out: Path) -> Path:
    return build_wheel(Project(PROJECT.root, PROJECT.line, tree), "cpu", out)


@pytest.fixture(scope="module")
def built(tree: Path) -> Path:
    return build(tree, tree.parent / "one")


def test_two_builds_in_two_directories_give_the_same_bytes(built: Path, tmp_path: Path) -> None:
    other = tmp_path / "elsewhere" / "vllm"
    apply_series(Project(PROJECT.root, PROJECT.line, other), real_series())
    again = build(other, tmp_path / "two")
    shutil.rmtree(tmp_path / "elsewhere")
    assert again.name == built.name
    assert again.read_bytes() == built.read_bytes()
    again.unlink()


def test_the_wheel_is_base_plus_series(tree: Path, built: Path) -> None:
    verify_wheel(Project(PROJECT.root, PROJECT.line, tree), built)
