# SPDX-License-Identifier: Apache-2.0
import shutil
from pathlib import Path

import pytest

from tests.tools.toy import Index, Toy, add_series, make_toy


@pytest.fixture(autouse=True)
def _no_index(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the fixture ``index`` answers: no test asks the machine's own package index."""
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple/")


@pytest.fixture(scope="session")
def _empty(tmp_path_factory: pytest.TempPathFactory) -> Toy:
    return make_toy(tmp_path_factory.mktemp("empty") / "project")


@pytest.fixture(scope="session")
def _full(_empty: Toy, tmp_path_factory: pytest.TempPathFactory) -> Toy:
    toy = _empty.copy(tmp_path_factory.mktemp("full") / "project")
    add_series(toy)
    return toy


@pytest.fixture
def empty(_empty: Toy, tmp_path: Path) -> Toy:
    """A project without patches and without a build tree."""
    return _empty.copy(tmp_path / "empty")


@pytest.fixture
def toy(_full: Toy, tmp_path: Path) -> Toy:
    """A project with three patches, applied."""
    return _full.copy(tmp_path / "project")


@pytest.fixture
def index(toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Index:
    """A package index that has the pinned release."""
    index = Index(tmp_path / "index")
    for path in toy.downloads.iterdir():
        shutil.copy(path, index.path(path.name))
    index.write_pages()
    monkeypatch.setenv("PIP_INDEX_URL", index.url)
    return index
