# SPDX-License-Identifier: Apache-2.0
"""From patch files to commits: the same everywhere, completely or not at all."""

import os
from pathlib import Path

import pytest

from tests.tools.toy import FOLDED, NAMES, Toy, add_series, git

HOSTILE_CONFIG = """\
[user]
    name = Somebody Else
    email = else@where
[core]
    autocrlf = true
    abbrev = 5
    hooksPath = {hooks}
    quotePath = false
[commit]
    gpgSign = true
[init]
    defaultBranch = other
    templateDir = {template}
[diff]
    noprefix = true
    mnemonicPrefix = true
    algorithm = histogram
    context = 9
    interHunkContext = 50
    renames = copies
    external = false
    relative = true
    suppressBlankEmpty = true
[format]
    subjectPrefix = HOSTILE
    numbered = true
    signature = hostile
    signOff = true
    attach = boundary
    coverLetter = true
    thread = deep
    from = true
    to = someone@else
    headers = "X-Hostile: yes\\n"
    encodeEmailHeaders = false
    pretty = fuller
    notes = true
[am]
    threeWay = true
    keepcr = false
    messageid = true
[mailinfo]
    scissors = true
[apply]
    whitespace = fix
"""


@pytest.fixture
def hostile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A home and an environment that would change everything if git saw them."""
    home = tmp_path / "home"
    for place in ("hooks", "template/hooks"):
        for name in ("pre-commit", "post-checkout", "applypatch-msg", "pre-applypatch"):
            hook = home / place / name
            hook.parent.mkdir(parents=True, exist_ok=True)
            hook.write_text("#!/bin/sh\nexit 1\n")
            hook.chmod(0o755)
    text = HOSTILE_CONFIG.format(hooks=home / "hooks", template=home / "template")
    (home / ".gitconfig").write_text(text)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(home))
    monkeypatch.setenv("GIT_DIR", "/nowhere")
    monkeypatch.setenv("GIT_WORK_TREE", "/nowhere")
    monkeypatch.setenv("GIT_INDEX_FILE", "/nowhere/index")
    monkeypatch.setenv("GIT_AUTHOR_NAME", "Somebody Else")
    monkeypatch.setenv("GIT_AUTHOR_DATE", "2001-01-01T00:00:00")
    monkeypatch.setenv("GIT_COMMITTER_DATE", "2001-01-01T00:00:00")
    monkeypatch.setenv("GIT_EXTERNAL_DIFF", "false")
    monkeypatch.setenv("GIT_DEFAULT_HASH", "sha256")
    monkeypatch.setenv("GIT_CONFIG_COUNT", "1")
    monkeypatch.setenv("GIT_CONFIG_KEY_0", "diff.noprefix")
    monkeypatch.setenv("GIT_CONFIG_VALUE_0", "true")
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    return text


def subjects(toy: Toy) -> list[str]:
    return git(toy.tree, "log", "--reverse", "--format=%s", "refs/re/base..HEAD").splitlines()


def test_each_patch_is_one_commit_with_its_whole_subject(toy: Toy) -> None:
    assert subjects(toy) == ["[Core] Count rows", FOLDED, "[Misc] Drop the old module"]


def test_the_patched_files_are_there(toy: Toy) -> None:
    assert "SETTING_9 = 99\n" in (toy.tree / "vllm/envs.py").read_text()
    assert (toy.tree / "vllm/rows/__init__.py").read_text() == '"""Rows: Σ."""\n'
    assert not (toy.tree / "vllm/old.py").exists()


def test_the_users_configuration_changes_no_commit(toy: Toy, empty: Toy, hostile: str) -> None:
    add_series(empty)
    assert toy.head() == empty.head()
    assert toy.snapshot() == empty.snapshot()


def test_the_configuration_of_the_build_tree_changes_no_byte(toy: Toy, hostile: str) -> None:
    before = toy.snapshot()
    with (toy.tree / ".git/config").open("a") as config:
        config.write(hostile)
    git(toy.tree, "config", "--unset", "re.record")
    assert "0 files changed" in toy.do("series", "export")
    assert toy.snapshot() == before


def test_author_and_dates_come_from_the_patch_alone(toy: Toy) -> None:
    who = "vLLM routed experts <patches@vllm-routed-experts.invalid>"
    facts = git(toy.tree, "log", "-1", "--format=%an <%ae>|%cn <%ce>|%aI|%cI", "HEAD~2")
    assert facts == f"{who}|{who}|2024-01-01T12:00:00+02:00|2024-01-01T12:00:00+02:00"


def test_applying_again_does_nothing(toy: Toy) -> None:
    index = (toy.tree / ".git/index").stat().st_mtime_ns
    head = toy.head()
    assert "nothing to do" in toy.do("series", "apply")
    assert toy.head() == head
    assert (toy.tree / ".git/index").stat().st_mtime_ns == index


def test_pristine_is_the_base_and_back_is_the_same_commit(toy: Toy) -> None:
    head = toy.head()
    toy.do("series", "apply", "--pristine")
    assert toy.head() == git(toy.tree, "rev-parse", "refs/re/base")
    assert "SETTING_9 = 9\n" in (toy.tree / "vllm/envs.py").read_text()
    toy.do("series", "apply")
    assert toy.head() == head


def test_another_tree_can_be_named(toy: Toy) -> None:
    other = toy.build / "pristine/vllm"
    toy.do("series", "apply", "--pristine", "--tree", str(other))
    assert subjects(toy)
    assert git(other, "rev-parse", "HEAD") == git(toy.tree, "rev-parse", "refs/re/base")


def test_before_stops_before_a_patch(toy: Toy) -> None:
    toy.do("series", "apply", "--before", NAMES[1])
    assert subjects(toy) == ["[Core] Count rows"]


def test_before_an_unknown_patch_is_refused(toy: Toy) -> None:
    assert NAMES[0] in toy.refuse("series", "apply", "--before", "unknown.patch")


@pytest.mark.parametrize("name", ["vllm/envs.py", "vllm/untracked.py"])
def test_uncommitted_work_is_refused_and_stays(toy: Toy, name: str) -> None:
    (toy.tree / name).write_text("mine\n")
    error = toy.refuse("series", "apply", "--pristine")
    assert "not committed" in error
    assert name in error
    assert (toy.tree / name).read_text() == "mine\n"


def test_commits_that_no_patch_holds_are_refused_and_listed(toy: Toy) -> None:
    toy.commit("[Core] My evening's work", {"vllm/mine.py": "mine\n"})
    head = toy.head()
    error = toy.refuse("series", "apply")
    assert "1 commits that would be lost" in error
    assert "[Core] My evening's work" in error
    assert "--discard" in error
    assert toy.head() == head


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ([("checkout", "--quiet", "--detach")], []),
        ([], [("checkout", "--quiet", "-b", "elsewhere", "refs/re/base")]),
    ],
    ids=["detached HEAD", "HEAD elsewhere"],
)
def test_commits_on_head_and_on_the_branch_are_refused(
    toy: Toy, before: list[tuple[str, ...]], after: list[tuple[str, ...]]
) -> None:
    for words in before:
        git(toy.tree, *words)
    toy.commit("[Core] My evening's work", {"vllm/mine.py": "mine\n"})
    for words in after:
        git(toy.tree, *words)
    assert "[Core] My evening's work" in toy.refuse("series", "apply")


def test_exported_commits_are_accounted_for(toy: Toy) -> None:
    toy.commit("[Core] My evening's work", {"vllm/mine.py": "mine\n"})
    toy.do("series", "export")
    toy.do("series", "apply", "--pristine")
    toy.do("series", "apply")
    assert (toy.tree / "vllm/mine.py").exists()


def test_discard_overrides_commits_and_changes(toy: Toy) -> None:
    head = toy.head()
    toy.commit("[Core] My evening's work", {"vllm/mine.py": "mine\n"})
    (toy.tree / "vllm/untracked.py").write_text("mine\n")
    toy.do("series", "apply", "--discard")
    assert toy.head() == head
    assert git(toy.tree, "status", "--porcelain") == ""


def test_a_rebase_under_way_is_refused(toy: Toy) -> None:
    (toy.tree / ".git/rebase-merge").mkdir()
    assert "under way" in toy.refuse("series", "apply")


def test_a_patch_that_needs_fuzz_is_refused_and_nothing_changes(toy: Toy) -> None:
    toy.do("series", "apply", "--pristine")
    toy.edit_patch(NAMES[0], "\n SETTING_7 = 7\n", "\n SETTING_7 = 'drifted'\n")
    before = (toy.head(), toy.snapshot(toy.tree / "vllm"))
    error = toy.refuse("series", "apply")
    assert "does not apply" in error
    assert NAMES[0] in error
    assert "patch does not apply" in error.split("$ git", 1)[1]
    assert (toy.head(), toy.snapshot(toy.tree / "vllm")) == before
    assert git(toy.tree, "worktree", "list").count("\n") == 0


def test_a_failure_in_a_later_patch_leaves_no_tree_behind(toy: Toy, empty: Toy) -> None:
    os.rename(empty.patches, empty.root / "none")
    toy.patches.rename(empty.patches)
    empty.edit_patch(NAMES[2], "-OLD = True", "-OLD = 'drifted'")
    assert NAMES[2] in empty.refuse("series", "apply")
    assert list(empty.build.iterdir()) == []


def test_a_patch_edited_by_hand_is_refused(toy: Toy) -> None:
    toy.do("series", "apply", "--pristine")
    toy.edit_patch(NAMES[0], "+SETTING_9 = 99", "+SETTING_9 = 98")
    error = toy.refuse("series", "apply")
    assert "made for another version of a file" in error
    assert f"{NAMES[0]}, vllm/envs.py" in error


def test_a_patch_edited_by_hand_is_taken_the_way_that_the_error_says(toy: Toy) -> None:
    toy.edit_patch(NAMES[0], "+SETTING_9 = 99", "+SETTING_9 = 98")
    error = toy.refuse("series", "apply")
    assert f"series apply --before {NAMES[0]}" in error
    toy.do("series", "apply", "--before", NAMES[0])
    assert "git am --3way --keep-non-patch" in error
    files = [str(toy.patches / name) for name in NAMES]
    git(toy.tree, "am", "--3way", "--keep-non-patch", *files)
    assert "the build tree is not the applied series" in toy.refuse(
        "wheel", "build", "--variant", "cpu"
    )
    toy.do("series", "export")
    toy.do("series", "apply")
    toy.do("series", "export", "--check")
    assert "SETTING_9 = 98\n" in (toy.tree / "vllm/envs.py").read_text()


def test_a_build_directory_of_another_pin_is_refused_and_stays(toy: Toy) -> None:
    path = toy.pin
    archive = toy.archive.read_bytes()
    text = path.read_text()
    digest = next(line for line in text.splitlines() if line.startswith("sha256"))
    path.write_text(text.replace(digest, 'sha256 = "' + "0" * 64 + '"', 1))
    head = toy.head()
    error = toy.refuse("series", "apply")
    assert "belongs to another pin" in error
    assert f"expected: source sha256 {'0' * 64}" in error
    assert toy.head() == head
    assert toy.archive.read_bytes() == archive


def test_a_directory_that_is_not_ours_is_refused(toy: Toy) -> None:
    other = toy.build / "other"
    other.mkdir()
    (other / "file").write_text("")
    assert "not made by series apply" in toy.refuse("series", "apply", "--tree", str(other))
