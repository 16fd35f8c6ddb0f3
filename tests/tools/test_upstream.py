# SPDX-License-Identifier: Apache-2.0
"""vLLM's own tests on two wheels: runs of a file, and the verdict on each difference."""

import os
import subprocess
import textwrap
import time
from pathlib import Path
from unittest import mock

import pytest

from tests.tools.toy import Toy
from tools.upstream import check_patches, hubcache, testrun
from tools.upstream.test import ADDED, BROKEN, CHANGED, OTHER, REMOVED, SAME, verdict
from tools.upstream.testrun import ERROR, FAILED, PASSED, SKIPPED, WHOLE_FILE, Outcome

OK = Outcome(PASSED)
BAD = Outcome(FAILED, "assert 1 == 2")
WORSE = Outcome(FAILED, "AttributeError: no rows")
NO_GPU = Outcome(ERROR, "RuntimeError: Found no NVIDIA driver")
SKIP = Outcome(SKIPPED, "no model")


@pytest.mark.parametrize(
    ("before", "after", "untouched", "touched"),
    [
        (OK, OK, SAME, SAME),
        (BAD, BAD, SAME, SAME),
        (SKIP, SKIP, SAME, SAME),
        (OK, BAD, BROKEN, BROKEN),
        (BAD, OK, OTHER, CHANGED),
        (BAD, WORSE, BROKEN, BROKEN),
        (OK, SKIP, BROKEN, CHANGED),
        (OK, NO_GPU, BROKEN, CHANGED),
        (SKIP, OK, OTHER, CHANGED),
        (OK, None, BROKEN, REMOVED),
        (SKIP, None, OTHER, REMOVED),
        (None, OK, OTHER, ADDED),
        (None, NO_GPU, OTHER, ADDED),
        (None, BAD, BROKEN, BROKEN),
    ],
)
def test_a_difference_has_one_name(
    before: Outcome | None, after: Outcome | None, untouched: str, touched: str
) -> None:
    assert verdict(before, after, ours=False) == untouched
    assert verdict(before, after, ours=True) == touched


@pytest.mark.parametrize(
    ("one", "two"),
    [
        ("<Pool at 0x7f12> 1.25 s in /tmp/a/x.py", "<Pool at 0xabc0> 31.5 s in /tmp/b/x.py"),
        ("Failed core proc(s): {}. No", "Failed core proc(s): {'EngineCore': 1}. No"),
    ],
)
def test_what_differs_from_run_to_run_is_no_difference(one: str, two: str) -> None:
    assert Outcome(FAILED, one).is_like(Outcome(FAILED, two))


def run(tmp_path: Path, source: str) -> dict[str, Outcome]:
    tree = tmp_path / "tree"
    (tree / "tests").mkdir(parents=True, exist_ok=True)
    (tree / "tests" / "__init__.py").touch()
    (tree / "tests" / "test_toy.py").write_text(textwrap.dedent(source))
    environment = {"PATH": os.defpath}
    results = tmp_path / "results" / "test_toy.xml"
    return testrun.run_file("tests/test_toy.py", tree, environment, results)


def test_every_test_of_a_file_has_its_outcome(tmp_path: Path) -> None:
    results = run(
        tmp_path,
        """
        import pytest

        @pytest.mark.parametrize("n", [1, 2])
        def test_half(n):
            assert n == 1, "n is two"

        @pytest.fixture
        def broken():
            raise RuntimeError("Found no NVIDIA driver")

        def test_fixture(broken): pass

        def test_skipped(): pytest.skip("not here")
        """,
    )
    found = {name.rpartition("::")[2]: outcome for name, outcome in results.items()}
    assert {name: outcome.status for name, outcome in found.items()} == {
        "test_half[1]": PASSED,
        "test_half[2]": FAILED,
        "test_fixture": ERROR,
        "test_skipped": SKIPPED,
    }
    assert "n is two" in found["test_half[2]"].message
    assert found["test_half[2]"].cannot_run is False
    assert found["test_fixture"].cannot_run is True
    assert found["test_skipped"].reason == "not here"


def test_only_a_finished_file_is_not_run_again(tmp_path: Path) -> None:
    kept = mock.patch("tools.upstream.testrun._run_kept", side_effect=KeyboardInterrupt)
    with kept, pytest.raises(KeyboardInterrupt):
        run(tmp_path, "def test(): assert False")
    first = run(tmp_path, "def test(): pass")
    assert [outcome.status for outcome in first.values()] == [PASSED]
    assert run(tmp_path, "def test(): assert False") == first


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("import os\ndef test(): os._exit(7)", "ended with status 7"),
        ("import no_such_module\ndef test(): pass", "no_such_module"),
    ],
)
def test_a_file_that_gives_no_results_is_an_error(tmp_path: Path, source: str, says: str) -> None:
    ((name, outcome),) = run(tmp_path, source).items()
    assert name == f"tests/test_toy.py::{WHOLE_FILE}"
    assert outcome.status == ERROR
    assert says in outcome.message


def test_a_file_that_hangs_is_ended_with_what_it_started(tmp_path: Path) -> None:
    source = """
    import pathlib, subprocess
    def test():
        child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
        pathlib.Path("child").write_text(str(child.pid))
        child.wait()
    """
    child, wait = tmp_path / "tree" / "child", subprocess.Popen.wait

    def until_child(run: subprocess.Popen, timeout: float | None = None) -> int:
        """The limit comes when the test has started its child."""
        while timeout and run.poll() is None and not (child.exists() and child.read_text()):
            time.sleep(0.1)
        return wait(run, timeout and 0)

    with mock.patch("subprocess.Popen.wait", until_child):
        ((_, outcome),) = run(tmp_path, source).items()
    assert "the limit" in outcome.message
    with pytest.raises(ProcessLookupError):
        os.kill(int(child.read_text()), 0)


def test_two_trees_are_compared_and_a_test_that_the_series_breaks_is_named(
    toy: Toy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hubcache, "STAND_INS", {})
    forty = "from vllm.envs import SETTING_40\ndef test_forty(): assert SETTING_40 == 40\n"
    toy.commit("[Test] Read the series' own file", {"tests/test_envs.py": forty})
    toy.commit("[Core] Break", {"tests/test_rows.py": "def test():\n    assert 1 == 2\n"})
    (toy.patches / "upstream-tests").write_text("# why\ntests/test_old.py\n")
    site = toy.build / "site"
    toy.do("series", "export")
    toy.do("series", "apply")
    toy.do("wheel", "build", "--variant", "cpu")
    toy.unpack(site)
    monkeypatch.setattr(check_patches, "SITE", site)
    error = toy.refuse("upstream", "test", "--out", str(toy.root / "table.md"))
    assert "broken: tests/test_rows.py tests.test_rows::test" in error
    assert "test_envs" not in error
    table = (toy.root / "table.md").read_text()
    assert "| `test_rows.py` | 1 / 0 / 0 / 0 | 0 / 0 / 1 / 0 | 0 | 1 broken |" in table
    assert "| `test_old.py` | 1 / 0 / 0 / 0 | 1 / 0 / 0 / 0 | 1 | none |" in table
    assert "| `test_envs.py` | not there | 1 / 0 / 0 / 0 | 0 | 1 added by the series |" in table


def test_a_stand_in_is_found_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "llava-hf/llava-1.5-7b-hf"
    monkeypatch.setattr(hubcache, "STAND_INS", {name: hubcache.STAND_INS[name]})
    home = hubcache.make_hub(tmp_path / "hub")
    from transformers import AutoConfig, AutoTokenizer

    offline = {"cache_dir": home / "hub", "local_files_only": True}
    config = AutoConfig.from_pretrained(name, **offline)
    tokenizer = AutoTokenizer.from_pretrained(name, **offline)
    assert tokenizer("a<image>b").input_ids.count(config.image_token_index) == 1
    assert tokenizer.decode(tokenizer("été").input_ids) == "été"
