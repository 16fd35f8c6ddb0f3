# SPDX-License-Identifier: Apache-2.0
"""Where the pinned source comes from, and what is refused."""

import hashlib
import shutil
import tarfile
from pathlib import Path

import pytest

from tests.tools.toy import TREE, VERSION, Toy, git, write_files, write_pin
from tests.tools.upstream import Index, make_index


@pytest.fixture
def index(empty: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Index:
    """A package index with every download; the source archive is no longer among these."""
    index = make_index(tmp_path / "index", empty)
    monkeypatch.setenv("PIP_INDEX_URL", index.url)
    empty.archive.unlink()
    return index


def make_submodule(toy: Toy) -> str:
    """Check the release out at vllm/ and pin its commit."""
    path = toy.root / "vllm"
    path.mkdir()
    git(path, "init", "--quiet")
    write_files(path, TREE)
    git(path, "add", "--force", "--all")
    identity = ["-c", "user.name=up", "-c", "user.email=up@stream"]
    git(path, *identity, "commit", "--quiet", "--message=release")
    commit = git(path, "rev-parse", "HEAD")
    write_pin(toy, git(path, "rev-parse", "HEAD^{tree}"), commit=commit)
    return commit


def test_a_file_of_the_index_is_downloaded_and_named(empty: Toy, index: Index) -> None:
    wanted = index.path(empty.archive.name).read_bytes()
    out = empty.do("source", "fetch")
    assert empty.archive.read_bytes() == wanted
    assert f"the source archive vllm-{VERSION}.tar.gz" in out
    assert hashlib.sha256(wanted).hexdigest() in out


def test_an_index_with_other_bytes_leaves_nothing_behind(empty: Toy, index: Index) -> None:
    index.path(empty.archive.name).write_bytes(b"not the release")
    before = set(empty.downloads.iterdir())
    assert "not the pinned one" in empty.refuse("source", "fetch")
    assert set(empty.downloads.iterdir()) == before


def test_an_index_without_the_file_is_named(empty: Toy, index: Index) -> None:
    index.path(empty.archive.name).unlink()
    index.write_pages()
    assert "does not have the pinned file" in empty.refuse("source", "fetch")


def test_a_full_disk_is_noticed_before_the_download(
    empty: Toy, monkeypatch: pytest.MonkeyPatch
) -> None:
    empty.archive.unlink()
    usage = shutil.disk_usage(empty.root)._replace(free=1000)
    monkeypatch.setattr("tools.source.fetch.shutil.disk_usage", lambda path: usage)
    monkeypatch.setenv("PIP_INDEX_URL", "file:///nowhere/")
    assert "not enough free disk space" in empty.refuse("source", "fetch")


def test_a_cached_file_with_one_changed_byte_is_refused_and_left_alone(empty: Toy) -> None:
    data = bytearray(empty.archive.read_bytes())
    expected = hashlib.sha256(data).hexdigest()
    data[len(data) // 2] ^= 1
    empty.archive.write_bytes(data)
    lines = empty.refuse("source", "fetch").splitlines()
    assert lines == [
        "error: a downloaded file has the wrong digest: it is not the pinned one",
        f"  where:    {empty.archive}",
        f"  expected: sha256 {expected}",
        f"  found:    sha256 {hashlib.sha256(data).hexdigest()}",
        f"  next:     delete it, then run the command again: rm {empty.archive}",
    ]
    assert empty.archive.read_bytes() == data


def test_a_cached_file_of_another_size_is_refused_and_left_alone(empty: Toy) -> None:
    data = empty.archive.read_bytes() + b"x"
    empty.archive.write_bytes(data)
    assert "the wrong size" in empty.refuse("source", "fetch")
    assert empty.archive.read_bytes() == data


@pytest.mark.parametrize(
    ("name", "link", "said"),
    [
        (f"vllm-{VERSION}/../../escaped", None, "leaves the tree"),
        ("/tmp/escaped-from-an-archive", None, "does not give the pinned tree"),
        (f"vllm-{VERSION}/link", "../../escaped", "leaves the tree"),
        (f"vllm-{VERSION}/link", "/etc", "leaves the tree"),
        (f"vllm-{VERSION}/link", "README.md", "does not give the pinned tree"),
    ],
)
def test_an_archive_member_that_leaves_the_tree_is_refused(
    empty: Toy, name: str, link: str | None, said: str
) -> None:
    member = tarfile.TarInfo(name)
    if link:
        member.type, member.linkname = tarfile.SYMTYPE, link
    else:
        member.size = 3
    empty.repin(member)
    assert said in empty.refuse("series", "apply", "--pristine")
    assert list(empty.build.iterdir()) == []
    assert not list(empty.root.rglob("escaped"))
    assert not Path("/tmp/escaped-from-an-archive").exists()


def test_an_archive_that_is_not_the_pinned_tree_is_refused(empty: Toy) -> None:
    member = tarfile.TarInfo(f"vllm-{VERSION}/vllm/more.py")
    member.size = 3
    empty.repin(member)
    assert "does not give the pinned tree" in empty.refuse("series", "apply", "--pristine")
    assert not empty.tree.exists()


def test_the_base_has_ignored_files_and_none_of_the_archives_own(empty: Toy) -> None:
    empty.do("series", "apply", "--pristine")
    assert git(empty.tree, "ls-files").splitlines() == sorted(TREE)


def test_submodule_and_archive_give_the_same_base(empty: Toy, tmp_path: Path) -> None:
    make_submodule(empty)
    other = empty.copy(tmp_path / "without")
    shutil.rmtree(other.root / "vllm")
    assert "the submodule vllm/ at" in empty.do("series", "apply", "--pristine")
    assert "the source archive" in other.do("series", "apply", "--pristine")
    assert empty.head() == other.head()


def test_the_submodule_needs_no_archive(empty: Toy) -> None:
    commit = make_submodule(empty)
    empty.archive.unlink()
    assert empty.do("source", "fetch") == f"source: the submodule vllm/ at {commit}\n"


def test_the_submodule_stays_as_it_is(empty: Toy) -> None:
    make_submodule(empty)
    before = empty.snapshot(empty.root / "vllm")
    empty.do("series", "apply", "--pristine")
    after = empty.snapshot(empty.root / "vllm")
    assert {n: d for n, d in after.items() if n != ".git/index"} == {
        n: d for n, d in before.items() if n != ".git/index"
    }


def test_a_submodule_at_another_commit_is_refused(empty: Toy) -> None:
    commit = make_submodule(empty)
    write_pin(empty, "d" * 40, commit="e" * 40)
    error = empty.refuse("source", "fetch")
    assert "not at the pinned commit" in error
    assert f"expected: {'e' * 40}\n  found:    {commit}" in error


def test_a_dirty_submodule_is_refused(empty: Toy) -> None:
    make_submodule(empty)
    (empty.root / "vllm/vllm/envs.py").write_text("dirty\n")
    error = empty.refuse("source", "fetch")
    assert "the submodule is not clean" in error
    assert "vllm/envs.py" in error


def test_a_submodule_directory_with_stray_files_is_refused(empty: Toy) -> None:
    (empty.root / "vllm").mkdir()
    (empty.root / "vllm/stray").write_text("")
    assert "holds files but no checkout" in empty.refuse("source", "fetch")


def test_an_empty_submodule_directory_means_the_archive(empty: Toy) -> None:
    (empty.root / "vllm").mkdir()
    assert "the source archive" in empty.do("source", "fetch")


@pytest.mark.parametrize("key", ["sha256", "commit", "size", "tag", "archive_only"])
def test_a_pin_without_a_key_names_it(empty: Toy, key: str) -> None:
    path = empty.pin
    lines = path.read_text().splitlines()
    lines.remove(next(line for line in lines if line.startswith(f"{key} = ")))
    path.write_text("\n".join(lines))
    error = empty.refuse("source", "fetch")
    assert f".{key}" in error.splitlines()[0]
