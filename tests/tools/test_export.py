# SPDX-License-Identifier: Apache-2.0
"""From commits to patch files: stable bytes, stable names, completely or not at all."""

import itertools

import pytest

from tests.tools.toy import HEADERS, NAMES, Toy, git, trouble


def autosquash(toy: Toy, subject: str) -> None:
    git(toy.tree, "commit", "--quiet", "--all", f"--fixup=:/{subject}")
    git(toy.tree, "rebase", "--quiet", "-i", "--autosquash", "refs/re/base")


def test_export_after_apply_changes_no_byte(toy: Toy) -> None:
    before = toy.snapshot()
    git(toy.tree, "config", "--unset", "re.record")
    assert "3 patches, 0 files changed" in toy.do("series", "export")
    assert toy.snapshot() == before


def test_patches_hold_nothing_that_changes_by_itself(toy: Toy) -> None:
    text = (toy.patches / NAMES[1]).read_text()
    lines = text.splitlines()
    assert lines[0] == "From 0000000000000000000000000000000000000000 Mon Sep 17 00:00:00 2001"
    assert "[PATCH] [Frontend]" in text
    assert not text.rstrip().endswith(git(toy.tree, "version").split()[-1])
    index = [line.split()[1] for line in lines if line.startswith("index ")]
    assert index
    assert all(len(ids) == 82 for ids in index)


def test_an_edit_by_fixup_changes_only_its_patch(toy: Toy) -> None:
    before = toy.snapshot()
    toy.edit("vllm/rows/__init__.py", "Rows", "All rows")
    autosquash(toy, r"\[Frontend\]")
    out = toy.do("series", "export")
    after = toy.snapshot()
    assert {name for name in after if after[name] != before.get(name)} == {NAMES[1]}
    assert out.splitlines()[0] == f"wrote {NAMES[1]}"


def test_a_patch_keeps_its_file_name_when_the_file_was_renamed(toy: Toy) -> None:
    (toy.patches / NAMES[1]).rename(toy.patches / "answers.patch")
    series = toy.patches / "series"
    series.write_text(series.read_text().replace(NAMES[1], "answers.patch"))
    toy.edit("vllm/rows/__init__.py", "Rows", "All rows")
    autosquash(toy, r"\[Frontend\]")
    toy.do("series", "export")
    assert series.read_text().splitlines() == [NAMES[0], "answers.patch", NAMES[2]]


def test_a_reworded_patch_keeps_its_file_name(toy: Toy) -> None:
    message = git(toy.tree, "log", "-1", "--format=%B").replace("Drop the old", "Do without the old")
    assert message.endswith(f"\nPatch-Filename: {NAMES[2]}")
    git(toy.tree, "commit", "--quiet", "--amend", "-m", message)
    toy.do("series", "export")
    assert (toy.patches / "series").read_text().splitlines() == NAMES
    assert b"Do without" in (toy.patches / NAMES[2]).read_bytes()


def test_comments_in_the_series_stay(toy: Toy) -> None:
    series = toy.patches / "series"
    series.write_text(f"# core\n{NAMES[0]}\n# the rest\n{NAMES[1]}\n{NAMES[2]}\n")
    toy.commit("[Core] One more", {"vllm/more.py": "MORE = 1\n"})
    toy.do("series", "export")
    assert series.read_text() == (
        f"# core\n{NAMES[0]}\n# the rest\n{NAMES[1]}\n{NAMES[2]}\none-more.patch\n"
    )


def test_other_files_beside_the_patches_stay(toy: Toy) -> None:
    (toy.patches / "NOTES.md").write_text("notes\n")
    toy.commit("[Core] One more", {"vllm/more.py": "MORE = 1\n"})
    toy.do("series", "export")
    assert (toy.patches / "NOTES.md").read_text() == "notes\n"


def test_check_fails_with_the_number_and_the_names_and_writes_nothing(toy: Toy) -> None:
    before = toy.snapshot()
    toy.edit("vllm/rows/__init__.py", "Rows", "All rows")
    autosquash(toy, r"\[Frontend\]")
    toy.commit("[Core] One more", {"vllm/more.py": "MORE = 1\n"})
    error = toy.refuse("series", "export", "--check")
    assert error.startswith("error: 3 files of the series are not what the build tree exports")
    assert error.split()[-3:] == [NAMES[1], "one-more.patch", "series"]
    assert toy.snapshot() == before


def test_check_fails_on_a_header_edited_by_hand(toy: Toy) -> None:
    toy.edit_patch(NAMES[0], "a user sees rows", "a user sees ROWS")
    assert NAMES[0] in toy.refuse("series", "export", "--check")


def test_a_new_order_is_exported(toy: Toy) -> None:
    script = toy.root / "reverse.sh"
    script.write_text('#!/bin/sh\nsed -i "2{h;d};3{G}" "$1"\n')
    script.chmod(0o755)
    git(toy.tree, "rebase", "-q", "-i", "refs/re/base", GIT_SEQUENCE_EDITOR=str(script))
    toy.do("series", "export")
    names = (toy.patches / "series").read_text().splitlines()
    assert names == [NAMES[0], NAMES[2], NAMES[1]]


def test_no_commits_are_refused(toy: Toy) -> None:
    toy.do("series", "apply", "--pristine")
    before = toy.snapshot()
    error = toy.refuse("series", "export")
    assert "nothing to export" in error
    assert "the series stays as it is" in error
    assert toy.snapshot() == before


def test_a_dirty_tree_is_refused(toy: Toy) -> None:
    toy.edit("vllm/envs.py", "SETTING_1 = 1\n", "SETTING_1 = 'mine'\n")
    assert "not committed" in toy.refuse("series", "export")


def test_a_merge_is_refused(toy: Toy) -> None:
    git(toy.tree, "checkout", "-q", "-b", "side", "HEAD~1")
    toy.commit("[Core] Side", {"vllm/side.py": "SIDE = 1\n"})
    git(toy.tree, "checkout", "-q", "routed-experts")
    git(toy.tree, "merge", "-q", "--no-ff", "-m", "a merge", "side")
    assert "a merge commit has no patch" in toy.refuse("series", "export")


@pytest.mark.parametrize("kind", ["fixup", "squash"])
def test_a_commit_that_waits_to_be_squashed_is_refused_with_the_command(
    toy: Toy, kind: str
) -> None:
    toy.commit(f"{kind}! [Core] Count rows", {"vllm/rows/__init__.py": "ROWS = 1\n"})
    error = toy.refuse("series", "export")
    assert f"{kind}! [Core] Count rows" in error
    assert "rebase -i --autosquash refs/re/base" in error


def test_a_commit_without_headers_is_refused(toy: Toy) -> None:
    toy.commit("[Core] No headers", {"vllm/more.py": "MORE = 1\n"}, body="Only words.\n")
    error = toy.refuse("series", "export")
    assert "Upstream-Status is missing" in error
    assert "Drop-when is missing" in error
    assert "Signed-off-by is missing" in error
    assert "no-headers.patch" in error


def test_an_empty_commit_is_refused(toy: Toy) -> None:
    toy.commit("[Core] Nothing", {})
    assert "the patch changes nothing" in toy.refuse("series", "export")


def test_a_clash_of_file_names_is_refused(toy: Toy) -> None:
    toy.commit("[Core] One more", {"vllm/more.py": "MORE = 1\n"})
    toy.commit("[Misc] One More!", {"vllm/more2.py": "MORE = 2\n"})
    error = toy.refuse("series", "export")
    assert "one-more.patch" in error
    assert "[Core] One more / [Misc] One More!" in error


def test_a_patch_without_a_commit_is_not_dropped_silently(toy: Toy) -> None:
    before = toy.snapshot()
    git(toy.tree, "reset", "-q", "--hard", "HEAD~1")
    error = toy.refuse("series", "export")
    assert f"--drop {NAMES[2]}" in error
    assert toy.snapshot() == before


def test_a_patch_is_dropped_by_name(toy: Toy) -> None:
    git(toy.tree, "reset", "-q", "--hard", "HEAD~1")
    assert f"removed {NAMES[2]}" in toy.do("series", "export", "--drop", NAMES[2])
    assert sorted(toy.snapshot()) == sorted([*NAMES[:2], "series", "upstream.toml"])


def test_a_stray_file_is_not_overwritten(toy: Toy) -> None:
    (toy.patches / "one-more.patch").write_text("somebody's\n")
    toy.commit("[Core] One more", {"vllm/more.py": "MORE = 1\n"})
    assert "one-more.patch" in toy.refuse("series", "export")
    assert (toy.patches / "one-more.patch").read_text() == "somebody's\n"


def test_a_message_that_git_am_would_cut_is_refused(toy: Toy) -> None:
    body = HEADERS + "\ndiff --git this is not\n"
    toy.commit("[Core] Cut", {"vllm/more.py": "MORE = 1\n"}, body=body)
    before = toy.snapshot()
    toy.refuse("series", "export")
    assert toy.snapshot() == before


def test_a_message_with_a_separator_is_refused(toy: Toy) -> None:
    toy.commit("[Core] Cut", {"vllm/more.py": "MORE = 1\n"}, body=HEADERS + "\n---\n\nnotes\n")
    assert "would not give back its commit" in toy.refuse("series", "export")


@pytest.mark.parametrize("number", [1, 2])
def test_a_failure_at_any_file_leaves_the_old_series(toy: Toy, number: int) -> None:
    before = toy.snapshot(), sorted(path.name for path in toy.root.iterdir())
    toy.edit("vllm/envs.py", "SETTING_9 = 99\n", "SETTING_9 = 98\n")
    autosquash(toy, r"\[Core\]")
    written = itertools.count(1)
    with trouble("pathlib.Path.replace", lambda *_: next(written) == number):
        toy.run("series", "export")
    assert (toy.snapshot(), sorted(path.name for path in toy.root.iterdir())) == before
    assert f"wrote {NAMES[0]}" in toy.do("series", "export")


def test_a_missing_build_tree_names_the_next_command(empty: Toy) -> None:
    assert "python -m tools series apply" in empty.refuse("series", "export")


def test_the_first_export_makes_the_list(empty: Toy) -> None:
    empty.do("series", "apply")
    empty.commit("[Core] First", {"vllm/first.py": "FIRST = 1\n"})
    (empty.patches / "series").unlink()
    empty.do("series", "export")
    assert sorted(empty.snapshot()) == ["first.patch", "series", "upstream.toml"]


def test_a_moved_file_is_written_as_it_is_not_as_a_guess(toy: Toy) -> None:
    git(toy.tree, "mv", "vllm/envs.py", "vllm/settings.py")
    toy.commit("[Misc] Move", {})
    toy.do("series", "export")
    text = (toy.patches / "move.patch").read_text()
    assert "rename" not in text
    assert "deleted file mode 100644" in text
    assert "new file mode 100644" in text


def test_the_page_that_the_series_adds_to_the_documentation_is_copied(toy: Toy) -> None:
    toy.commit("[Docs] One page", {"docs/features/routed_experts.md": "# Rows\n"})
    error = toy.refuse("series", "export", "--check")
    assert "docs/routed_experts.md" in error.splitlines()[-1]
    assert not (toy.root / "docs").exists()
    toy.do("series", "export")
    assert (toy.root / "docs/routed_experts.md").read_text() == "# Rows\n"
    toy.do("series", "export", "--check")
