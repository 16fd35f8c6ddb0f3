# SPDX-License-Identifier: Apache-2.0
"""A wheel is built again when something that decides its bytes changed, and only then."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tools.common.pin import DEFAULT_LINE

ROOT = Path(__file__).resolve().parents[2]
IMPORTED = """
import sys, tools.wheel.build
files = (m.__file__ for n, m in sys.modules.items() if n.startswith("tools.wheel."))
print("\\n".join(files))
"""


def expand(root: Path, text: str) -> list[str]:
    """The words that make expands a text to."""
    command = ["make", "--no-print-directory", "--directory", str(root)]
    command += [f"--eval=expand: ; @echo {text}", "expand"]
    alone = os.environ | {"MAKEFLAGS": "", "MAKELEVEL": "0"}  # also under another make
    done = subprocess.run(command, env=alone, capture_output=True, text=True, check=True)
    return done.stdout.split()


def test_the_digest_covers_the_modules_that_write_a_wheel() -> None:
    command = [sys.executable, "-c", IMPORTED]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    imported = {str(Path(line).relative_to(ROOT)) for line in done.stdout.splitlines()}
    assert set(expand(ROOT, "$(WRITERS)")) == imported | {"tools/series/series.py"}


def test_the_makefile_and_the_tools_mean_the_same_line_where_none_is_named() -> None:
    assert expand(ROOT, "$(LINE)") == [DEFAULT_LINE]


# The digests of the pristine and of the patched wheel.
DIGESTS = "$(PRISTINE_ID) $(SERIES_ID)"


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    for name in ("Makefile", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    for name in ("tools", "patches", "requirements"):
        shutil.copytree(ROOT / name, tmp_path / name)
    shutil.copytree(tmp_path / "patches" / DEFAULT_LINE, tmp_path / "patches" / "other")
    return tmp_path


@pytest.mark.parametrize(
    ("name", "pattern", "changed"),
    [
        ("pyproject.toml", r"line-length = \d+", ()),
        ("pyproject.toml", r'^version = "\d+"', ("pristine", "series")),
        (f"patches/{DEFAULT_LINE}/upstream.toml", r"^size = \d+", ("pristine", "series")),
        (f"patches/{DEFAULT_LINE}/series", r"\A", ("series",)),
        ("patches/other/series", r"\A", ()),
        ("requirements/tools.txt", r"^cyclonedx-python-lib==", ("pristine", "series")),
        (f"requirements/{DEFAULT_LINE}/environment.txt", r"^pytest==", ()),
        ("tools/wheel/plan.py", r"\A", ("pristine", "series")),
        ("tools/wheel/verify.py", r"\A", ()),
        ("tools/common/git.py", r"\A", ()),
    ],
)
def test_a_digest_changes_with_what_it_covers(
    copy: Path, name: str, pattern: str, changed: tuple[str, ...]
) -> None:
    path, before = copy / name, expand(copy, DIGESTS)
    text, count = re.subn(pattern, r"\g<0>#", path.read_text(), count=1, flags=re.MULTILINE)
    assert count == 1
    path.write_text(text)
    pairs = zip(before, expand(copy, DIGESTS), strict=True)
    differ = [old != new for old, new in pairs]
    assert differ == ["pristine" in changed, "series" in changed]
