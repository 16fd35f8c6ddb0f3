# SPDX-License-Identifier: Apache-2.0
"""Where pinned files come from, and what is refused."""

import hashlib
import shutil
import tarfile
from pathlib import Path

import pytest

from tests.tools.toy import TREE, Index, Toy, git


def test_what_is_not_the_whole_pinned_file_is_refused_and_leaves_nothing(
    toy: Toy, index: Index
) -> None:
    shutil.rmtree(toy.tree)
    toy.archive.unlink()
    before, name = set(toy.downloads.iterdir()), toy.archive.name
    path = index.path(name)
    right = path.read_bytes()
    path.unlink()
    assert "a download failed" in toy.refuse("series", "apply")
    for wrong in (b"not the release", right[:100]):
        path.write_bytes(wrong)
        assert "nothing was kept" in toy.refuse("series", "apply")
    path.rename(path.with_name("vllm-1.tar.gz"))
    index.write_pages()
    assert "does not have the pinned file" in toy.refuse("series", "apply")
    assert set(toy.downloads.iterdir()) == before
    path.write_bytes(right)
    index.write_pages()
    done = toy.run("series", "apply")
    assert toy.archive.read_bytes() == right
    assert f"{name} " in done.stderr
    assert "100%" in done.stderr


def test_a_file_with_one_changed_byte_is_refused_and_left_alone(empty: Toy) -> None:
    path, data = empty.archive, bytearray(empty.archive.read_bytes())
    expected = hashlib.sha256(data).hexdigest()
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    assert empty.refuse("series", "apply").splitlines() == [
        "error: a downloaded file is not the pinned one",
        f"  where:    {path}",
        f"  expected: {len(data)} bytes, sha256 {expected}",
        f"  found:    {len(data)} bytes, sha256 {hashlib.sha256(data).hexdigest()}",
        f"  next:     delete it, then run the command again: rm {path}",
    ]
    assert path.read_bytes() == data


def test_the_base_is_the_release_without_what_building_the_archive_added(empty: Toy) -> None:
    empty.do("series", "apply", "--pristine")
    # Files that .gitignore names are there.
    assert git(empty.tree, "ls-files").splitlines() == sorted(TREE)


@pytest.mark.parametrize(
    ("name", "link", "said"),
    [
        ("vllm-9.8.7/../../escaped", None, "cannot be unpacked"),
        ("/tmp/escaped-from-an-archive", None, "does not give the pinned tree"),
        ("vllm-9.8.7/vllm/more.py", None, "does not give the pinned tree"),
        ("vllm-9.8.7/link", "/etc", "does not give the pinned tree"),
        ("vllm-9.8.7/link", "README.md", "does not give the pinned tree"),
    ],
)
def test_an_archive_with_another_member_is_refused(
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


@pytest.mark.parametrize("key", ["sha256", "commit", "size", "tag"])
def test_a_pin_without_a_key_names_it(empty: Toy, key: str) -> None:
    lines = empty.pin_file.read_text().splitlines()
    lines.remove(next(line for line in lines if line.startswith(f"{key} = ")))
    empty.pin_file.write_text("\n".join(lines))
    assert f".{key}" in empty.refuse("series", "apply").splitlines()[0]
