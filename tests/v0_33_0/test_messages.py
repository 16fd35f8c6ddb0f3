# SPDX-License-Identifier: Apache-2.0
"""The messages of the installed wheel to a front end that was compiled with the release."""

import json
import subprocess
from pathlib import Path

import pytest

from tests.real import PROJECT
from tools.common.pin import Project
from tools.series.tree import BASE_REF
from tools.wheel.compiled import compare_messages, speak
from tools.wheel.verify import SITE


@pytest.fixture(scope="module")
def release(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the release's Python and the installed compiled files."""
    folder = tmp_path_factory.mktemp("release")
    tree = Project(PROJECT.root, "v0.33.0").tree
    archive = ["git", "-C", str(tree), "archive", BASE_REF, "vllm"]
    packed = subprocess.run(archive, check=True, capture_output=True).stdout
    subprocess.run(["tar", "x", "-C", str(folder)], input=packed, check=True)
    for file in [*SITE.glob("vllm/**/*.so"), SITE / "vllm/_version.py"]:
        link = folder / file.relative_to(SITE)
        link.parent.mkdir(parents=True, exist_ok=True)
        if not link.exists():
            link.symlink_to(file)
    return folder


def test_messages_without_rows_have_the_bytes_of_the_release(release: Path) -> None:
    assert not [*compare_messages(release, SITE)]


def test_messages_are_those_of_an_engine(release: Path) -> None:
    """Otherwise the comparison would compare nothing."""
    written = json.loads(speak(release, "write"))
    assert {"EngineCoreOutputs full", "EngineCoreRequest full"} < written.keys()
    assert json.loads(speak(release, "read", given=json.dumps(written))) == written
