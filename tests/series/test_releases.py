# SPDX-License-Identifier: Apache-2.0
"""The real series on other real releases; downloads 100 MB."""

import shutil

import pytest

from tests.real import PROJECT, need_source, real_series
from tools.common.cli import ToolError
from tools.common.pin import Project
from tools.series.rebase import CONFLICT, Trial, find_target, try_all
from tools.source.fetch import Index

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Project:
    """A copy of pin and series of this repository; downloads are shared."""
    real_series()
    need_source()
    try:
        Index().files(PROJECT.pin.source.distribution)
    except ToolError as error:
        pytest.skip(str(error))
    root = tmp_path_factory.mktemp("releases")
    shutil.copytree(PROJECT.patches, root / "patches" / PROJECT.line)
    downloads = PROJECT.root / "build" / "downloads"
    downloads.mkdir(parents=True, exist_ok=True)
    (root / "build").mkdir()
    (root / "build" / "downloads").symlink_to(downloads)
    return Project(root)


def trials(project: Project, version: str) -> list[Trial]:
    return try_all(project, find_target(project, version, None))


@pytest.mark.parametrize("version", ["0.20.0", "0.20.1"])
def test_every_patch_applies_to_the_releases_before(project: Project, version: str) -> None:
    assert [trial.name for trial in trials(project, version) if trial.verdict != "clean"] == []


def test_conflicts_with_a_release_that_captures_itself_are_named(project: Project) -> None:
    found = {trial.name: trial for trial in trials(project, "0.21.0")}
    assert found["routed-experts-docs.patch"].verdict == "clean"
    removed = found["routed-experts-remove-shared-memory.patch"]
    assert removed.verdict == CONFLICT
    paths = {file.path for patch in real_series() for file in patch.diff}
    assert any("routed_experts_capturer.py" in said for said in removed.conflicts)
    assert all(any(path in said for path in paths) for said in removed.conflicts)
