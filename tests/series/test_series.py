# SPDX-License-Identifier: Apache-2.0
"""Every real series on its real release."""

from pathlib import Path

import pytest

from tests.real import PROJECTS, need_source, real_series
from tools.common.pin import Project
from tools.series.apply import apply_series
from tools.series.check import check_series
from tools.series.export import export_series
from tools.series.series import Series
from tools.series.status import table


@pytest.fixture(scope="module", params=PROJECTS, ids=lambda project: project.line)
def project(request: pytest.FixtureRequest) -> Project:
    return request.param


@pytest.fixture(scope="module")
def series(project: Project) -> Series:
    return real_series(project)


@pytest.fixture(scope="module")
def tree(project: Project, series: Series, tmp_path_factory: pytest.TempPathFactory) -> Path:
    need_source(project)
    path = tmp_path_factory.mktemp("series") / "vllm"
    apply_series(Project(project.root, project.line, path), series)
    return path


def test_the_series_keeps_its_rules(project: Project, series: Series) -> None:
    assert check_series(project) == series


def test_the_table_of_patches_is_of_these_patches(project: Project, series: Series) -> None:
    assert (project.patches / "README.md").read_text() == table(project)


def test_export_after_apply_changes_no_file(project: Project, series: Series, tree: Path) -> None:
    assert export_series(Project(project.root, project.line, tree), check=True) == {}
