# SPDX-License-Identifier: Apache-2.0
"""The status report in every state of the series."""

import re
import shutil

import pytest

from tests.tools.toy import ENVS, NAMES, TREE, VERSION, Toy, git
from tests.tools.upstream import Index, everything


@pytest.fixture(autouse=True)
def _wide(index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "400")  # no line is folded


def status(toy: Toy, *arguments: str) -> dict[str, str]:
    """The lines of a status by their topic; those of patches by name."""
    said: dict[str, str] = {}
    for line in toy.do("series", "status", *arguments).splitlines():
        what, _, rest = line.strip().partition(" ")
        said[what] = f"{said[what]}; {rest.strip()}" if what in said else rest.strip()
    return said


def test_an_applied_series_is_all_there_and_clean(toy: Toy) -> None:
    said = status(toy)
    assert said["pin"].startswith(f"vLLM {VERSION}, v{VERSION}, commit cccccc")
    assert said["newest"] == f"{VERSION}, the pinned one"
    assert said["series"].startswith("3 patches, fingerprint ")
    assert said["applied"] == f"3 of 3 patches as they are, in {toy.tree}"
    assert said["export"] == "clean: it would change no file"
    assert said["drift"] == "none"
    for name in NAMES:
        assert re.fullmatch(r"Pending +\d+ +\d+ +\d+ +applied", said[name])


def test_lines_that_a_later_patch_changes_are_counted(toy: Toy) -> None:
    before = status(toy)["churn"]
    assert before.startswith("0 of ")
    envs = toy.tree / "vllm" / "envs.py"
    envs.write_text("FIRST = 1\nSECOND = 2\n" + envs.read_text())
    git(toy.tree, "commit", "--all", "--message=Add settings")
    envs.write_text(envs.read_text().replace("SECOND = 2", "SECOND = 3"))
    git(toy.tree, "commit", "--all", "--message=Change one")
    number, _, lines, *_ = before.split()
    after = status(toy)["churn"].split()
    assert (int(number), int(after[0]), int(after[2])) == (0, 1, int(lines) + 3)


def test_status_changes_nothing(toy: Toy) -> None:
    before = everything(toy)
    status(toy)
    assert everything(toy) == before


def test_the_newest_final_release_that_is_not_withdrawn_is_named(toy: Toy, index: Index) -> None:
    index.withdrawn.add("vllm-9.9.9.tar.gz")
    for version in ("9.8.8", "9.8.10", "9.9.0rc1", "9.9.9", "1.0.0"):
        index.publish(version, TREE, wheels=False)
    assert status(toy)["newest"] == "9.8.10, 2 releases after the pinned one"


def test_without_an_answer_the_newest_release_is_unknown(
    toy: Toy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple/")
    said = status(toy)
    assert said["newest"].startswith("unknown: the package index")
    assert said["export"].startswith("clean")


def test_offline_does_not_ask(toy: Toy, index: Index) -> None:
    index.publish("9.9.0", TREE)
    assert status(toy, "--offline")["newest"] == "unknown: not asked"


def test_a_missing_build_tree_is_reported(toy: Toy) -> None:
    shutil.rmtree(toy.tree)
    said = status(toy)
    assert said["applied"].startswith("no: there is no build tree")
    assert said[NAMES[0]].endswith("not applied")


def test_a_build_tree_of_another_pin_is_reported(toy: Toy) -> None:
    path = toy.pin
    path.write_text(re.sub(r'sha256 = "\w+"', f'sha256 = "{"0" * 64}"', path.read_text(), count=1))
    assert "belongs to another pin" in status(toy)["applied"]


def test_a_series_applied_in_part_is_counted(toy: Toy) -> None:
    toy.do("series", "apply", "--before", NAMES[2])
    said = status(toy)
    assert said["applied"].startswith("2 of 3 patches")
    assert said[NAMES[1]].endswith(" applied")
    assert said[NAMES[2]].endswith("not applied")


def test_commits_that_were_not_exported_are_drift(toy: Toy) -> None:
    toy.commit("[Core] My evening's work", {"vllm/mine.py": "mine\n"})
    said = status(toy)
    assert said["drift"] == "1 commit not exported: [Core] My evening's work"
    assert said["export"] == "would change 2 files: my-evenings-work.patch, series"


def test_an_amended_commit_differs_from_its_patch(toy: Toy) -> None:
    toy.edit("vllm/envs.py", "SETTING_1 = 1\n", "SETTING_1 = 'mine'\n")
    assert status(toy)["drift"] == "1 file changed and not committed in the build tree"
    git(toy.tree, "commit", "--quiet", "--all", "--amend", "--no-edit")
    said = status(toy)
    assert said[NAMES[2]].endswith("differs")
    assert said["export"] == f"would change 1 file: {NAMES[2]}"


def test_a_patch_changed_since_the_apply_is_drift(toy: Toy) -> None:
    toy.edit_patch(NAMES[1], "Rows are wanted", "Rows are much wanted")
    said = status(toy)
    assert said["drift"] == "the patches changed since the apply"
    assert said[NAMES[1]].endswith("differs")
    assert said["applied"].startswith("2 of 3")


def test_a_damaged_patch_does_not_hide_the_others(toy: Toy) -> None:
    toy.edit_patch(NAMES[0], "@@ -7,7 +7,7 @@", "@@ -7,7 +7,9 @@")
    said = status(toy)
    assert said[NAMES[0]].endswith("the diff cannot be read")
    assert said[NAMES[1]].endswith("applied")


def test_a_series_that_cannot_be_read_is_reported(toy: Toy) -> None:
    (toy.patches / NAMES[0]).unlink()
    assert status(toy)["series"].startswith("cannot be read: the list of patches")


def test_a_rebase_that_waits_is_reported(toy: Toy, index: Index) -> None:
    envs = ENVS.replace("SETTING_9 = 9\n", "SETTING_9 = 'nine'\n")
    index.publish("9.8.8", {**TREE, "vllm/envs.py": envs})
    toy.refuse("series", "rebase", "--onto", "9.8.8")
    said = f"onto vLLM 9.8.8 in {toy.build}/rebase/tree: 0 of 3 patches done, stopped at [Core] "
    assert said in status(toy)["rebase"]
