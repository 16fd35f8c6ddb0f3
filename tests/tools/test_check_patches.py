# SPDX-License-Identifier: Apache-2.0
"""Every patch at its own place: later patches do not count."""

import re

import pytest

from tests.tools.toy import HEADERS, Toy, write_files
from tools.common.cli import ToolError
from tools.common.git import Git
from tools.series.series import read_series, with_needs
from tools.series.tree import BASE_REF
from tools.upstream import check_patches, hubcache
from tools.upstream.check_patches import IMPORTS, LINTERS, TESTS, TYPES, Checker, Finding

HEADER = "# SPDX-License-Identifier: Apache-2.0\n"
# As vLLM's own hook: it adds a missing header, and fails.
SPDX_HOOK = f"""
import sys
bad = [name for name in sys.argv[1:] if not open(name).read().startswith({HEADER!r})]
for name in bad:
    text = {HEADER!r} + open(name).read()
    open(name, "w").write(text)
sys.exit(bool(bad))
"""
MYPY_HOOK = """
def group_files(names):
    return {"": [name for name in names if name.startswith("vllm/")], "tests": []}
"""
HOOKS = {
    "tools/pre_commit/check_spdx_header.py": SPDX_HOOK,
    "tools/pre_commit/mypy.py": MYPY_HOOK,
    "ruff.toml": "line-length = 88\n",
    "vllm/wrong.py": f'{HEADER}NUMBER: int = "wrong before"\n',
}
ROWS = f'{HEADER}\n\ndef count(rows: list[int]) -> int:\n    """Rows."""\n    return len(rows)\n'
CALLER = f"{HEADER}from vllm.rows import count\n\nNUMBER: int = count([1])\n"
TEST = f"{HEADER}from vllm.rows import count\n\n\ndef test_count():\n    assert count([1]) == 1\n"
GOOD = {"vllm/rows.py": ROWS, "vllm/caller.py": CALLER, "tests/test_count.py": TEST}


@pytest.fixture
def series(empty: Toy, monkeypatch: pytest.MonkeyPatch) -> Toy:
    """A project with one patch, which adds the hooks and a type error."""
    monkeypatch.setattr(hubcache, "STAND_INS", {})
    monkeypatch.setattr(check_patches, "MODULES", ("vllm",))
    monkeypatch.setattr(check_patches, "HOOKS", ("check_spdx_header",))
    empty.do("series", "apply")
    empty.commit("[Misc] Have hooks", HOOKS)
    return empty


def checked(toy: Toy, *checks: str) -> list[dict[str, Finding]]:
    """Findings for every patch after the first."""
    site = toy.root / "site"
    write_files(site, {"vllm/_version.py": "__version__ = '1'\n"})
    git = Git(toy.tree)
    checker = Checker(git, site, toy.build / "check-patches")
    commits = git.commits(f"{BASE_REF}..HEAD")[1:]
    return [{check: checker.check(commit, check) for check in checks} for commit in commits]


@pytest.mark.parametrize(
    ("check", "said", "name", "text"),
    [
        (IMPORTS, "2 modules", "vllm/rows.py", f"{HEADER}import vllm.missing\n"),
        (LINTERS, "check_spdx_header", "vllm/rows.py", "ROWS = 1\n"),
        (LINTERS, "ruff check", "vllm/rows.py", f"{HEADER}import os\n"),
        (LINTERS, "ruff format", "vllm/rows.py", f"{HEADER}ROWS  = 1\n"),
        (LINTERS, "rumdl check", "docs/rows.md", "# Rows\n# Rows\n"),
        (TYPES, "1 errors", "vllm/rows.py", f'{HEADER}ROWS: int = "1"\n'),
        (TESTS, "0 passed, 1 failed", "tests/test_a.py", "def test():\n    assert not 1\n"),
    ],
)
def test_a_breach_is_named(series: Toy, check: str, said: str, name: str, text: str) -> None:
    series.commit("[Core] Break", {name: text})
    (found,) = checked(series, check)
    assert not found[check].good
    assert found[check].said == said
    assert found[check].details


OLD = "def test_old():\n    raise KeyError('rows')\n\n\ndef test_good():\n    pass\n"


@pytest.fixture
def failing(series: Toy) -> Toy:
    """The project on a release that has a failing test, and with a patch that leaves it alone."""
    series.commit("Release", {"tests/test_a.py": OLD})
    Git(series.tree).run("update-ref", BASE_REF, "HEAD")
    series.commit("[Core] Count", GOOD)
    return series


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (f"# Rows.\n{OLD}", "1 passed, 1 fail on the release too"),
        (OLD.replace("KeyError", "ValueError"), "1 passed, 1 failed"),
        (OLD.replace("pass", "raise KeyError"), "0 passed, 1 fail on the release too, 1 failed"),
        (OLD.replace("test_old", "test_new"), "1 passed, 1 failed"),
    ],
)
def test_a_test_counts_unless_it_fails_the_same_way_on_the_release(
    failing: Toy, text: str, said: str
) -> None:
    failing.commit("[Core] Break", {"tests/test_a.py": text})
    (found,) = checked(failing, TESTS)
    assert found[TESTS].said == said
    assert found[TESTS].good == (", 1 failed" not in said)


def test_a_later_patch_does_not_repair_an_earlier_one(series: Toy) -> None:
    series.commit("[Core] Import early", {**GOOD, "vllm/early.py": f"{HEADER}import vllm.late\n"})
    series.commit("[Core] Add late", {"vllm/late.py": HEADER})
    early, late = checked(series, IMPORTS)
    assert (early[IMPORTS].good, late[IMPORTS].good) == (False, True)
    assert "vllm.late" in early[IMPORTS].details


MISSING = "import not_installed\n"
AGAIN = (
    f"try:\n    {MISSING}except ImportError as error:\n    raise ImportError('get it') from error\n"
)


@pytest.mark.parametrize(
    ("check", "text"),
    [(IMPORTS, MISSING), (IMPORTS, AGAIN), (TYPES, "import requests\n")],
    ids=["not installed", "not installed, and said so", "without stubs"],
)
def test_a_module_may_need_what_is_not_there(series: Toy, check: str, text: str) -> None:
    series.commit("[Core] Want a library", {"vllm/rows.py": HEADER + text})
    (found,) = checked(series, check)
    assert found[check].good


def test_an_error_in_a_file_that_the_patch_does_not_touch_counts(series: Toy) -> None:
    series.commit("[Core] Count", GOOD)
    series.commit("[Core] Count in fractions", {"vllm/rows.py": ROWS.replace("-> int", "-> float")})
    good, bad = checked(series, TYPES)
    assert good[TYPES].good
    assert "vllm/caller.py: error: Incompatible types" in bad[TYPES].details
    assert "vllm/wrong.py" not in bad[TYPES].details


def test_what_was_checked_is_not_checked_again(
    series: Toy, monkeypatch: pytest.MonkeyPatch
) -> None:
    series.commit("[Core] Count", GOOD)
    first = checked(series, *check_patches.CHECKS)
    monkeypatch.setattr(Checker, "_go_to", lambda *_: pytest.fail("went there again"))
    assert checked(series, *check_patches.CHECKS) == first


def test_the_command_tells_of_every_patch_and_fails_with_one(
    series: Toy, monkeypatch: pytest.MonkeyPatch
) -> None:
    series.commit("[Core] Count", GOOD)
    series.commit("[Core] Break", {"vllm/rows.py": ROWS.replace("len(rows)", "0")})
    series.commit("[Core] Break the test", {"tests/test_count.py": TEST.replace("== 1", "== 2")})
    series.do("series", "export")
    series.do("series", "apply")
    series.do("wheel", "build", "--variant", "cpu")
    series.unpack(series.root / "site")
    table = series.root / "table.md"
    names = ["count.patch", "break.patch", "break-the-test.patch"]
    monkeypatch.setattr(check_patches, "SITE", series.root / "site")
    place = ("--out", str(table))
    assert "no such patch" in series.refuse("upstream", "check-patches", "another", *place)
    error = series.refuse("upstream", "check-patches", *names, *place)
    assert "break-the-test.patch, tests: 0 passed, 1 failed" in error
    lines = table.read_text().splitlines()
    assert "| `count.patch` | 3 modules | 3 files | no error | 1 passed |" in lines
    assert "| `break.patch` | 2 modules | 1 files | no error | none touched |" in lines
    bad = "| `break-the-test.patch` | 1 modules | 1 files | no error | **0 passed, 1 failed** |"
    assert bad in lines
    said = series.do("series", "status")
    assert re.search(r"fingerprint (\w+)", said)[1] in lines[4]


def test_a_patch_alone_stands_on_the_release_with_what_it_needs_or_is_refused(series: Toy) -> None:
    series.commit("[Core] Count", GOOD)
    series.commit("[Core] Stand aside", {"vllm/aside.py": HEADER})
    series.commit("[Core] Double", {"vllm/twice.py": HEADER}, "Needs: count.patch\n" + HEADERS)
    series.commit("[Core] Break", {"vllm/rows.py": ROWS.replace("len(rows)", "0")})
    series.do("series", "export")
    patches, tree = read_series(series.series_file), Git(series.tree)
    commits = tree.commits(f"{BASE_REF}..HEAD")
    where = dict(zip((patch.name for patch in patches), commits, strict=True))
    checker = Checker(tree, series.root / "site", series.build / "check-patches")
    with pytest.raises(ToolError, match="does not apply to the release with what it needs") as said:
        checker.stand_alone("break.patch", [where["break.patch"]])
    assert "vllm/rows.py" in str(said.value.found)
    stack = [where[name] for name in with_needs(patches, ["double.patch"])]
    commit, git = checker.stand_alone("double.patch", stack), Git(checker.tree)
    assert git.changed(f"{commit}^", commit) == ["vllm/twice.py"]
    there = git.files(commit)
    assert "vllm/rows.py" in there
    assert "vllm/aside.py" not in there
