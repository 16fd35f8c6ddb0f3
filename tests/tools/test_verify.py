# SPDX-License-Identifier: Apache-2.0
"""The proof that a wheel is base plus series finds every deviation."""

import itertools
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.tools.test_wheel import CPU, DIST_INFO, build, contents
from tests.tools.toy import NAMES, TAG, VERSION, Toy, record_line
from tools.wheel.verify import find_site

Files = dict[str, bytes]


def rewrite(path: Path, edit: Callable[[Files], object]) -> None:
    """Change a wheel's files and give it a RECORD that agrees with the change."""
    files = contents(path)
    edit(files)
    record = f"{DIST_INFO}/RECORD"
    files.pop(record, None)
    lines = "".join(record_line(name, data) for name, data in files.items())
    files[record] = f"{lines}{record},,\n".encode()
    with zipfile.ZipFile(path, "w") as wheel:
        for name, data in files.items():
            wheel.writestr(name, data)


def deviations(error: str) -> set[tuple[str, str]]:
    """(kind, path) of each deviation."""
    lines = error.splitlines()
    return {
        (kind, where.split(":", 1)[1].strip())
        for kind, where in itertools.pairwise(lines)
        if where.startswith("  where:")
    }


def install(path: Path, site: Path) -> Path:
    """What an installer leaves behind, in short."""
    with zipfile.ZipFile(path) as wheel:
        wheel.extractall(site)
    for name in ("INSTALLER", "REQUESTED", "direct_url.json", "uv_cache.json"):
        (site / DIST_INFO / name).write_text("")
    with (site / DIST_INFO / "RECORD").open("a") as record:
        record.write(f"../../../bin/vllm,,\n{DIST_INFO}/INSTALLER,,\n")
    for name in ("vllm/__pycache__/envs.cpython-311.pyc", "vllm/rows/__pycache__/x.pyc"):
        (site / name).parent.mkdir()
        (site / name).write_bytes(b"")
    return site


def test_a_patched_wheel_passes(toy: Toy) -> None:
    path = build(toy)
    out = toy.do("wheel", "verify", str(path))
    # Patched: envs, data, rows; ours: platforms, _version, METADATA, WHEEL, SBOM, RECORD.
    assert out == f"verified: {path.name}: 15 files, 9 of them not the base wheel's, 3 patches\n"


def test_without_arguments_the_built_wheels_are_verified(toy: Toy) -> None:
    toy.do("wheel", "build", "--variant", "cpu")
    toy.do("wheel", "build", "--variant", "cuda")
    assert toy.do("wheel", "verify").count("verified: ") == 2


def test_without_any_wheel_the_next_command_is_named(toy: Toy) -> None:
    assert "wheel build" in toy.refuse("wheel", "verify")


def test_a_wheel_packed_again_with_the_same_files_passes(toy: Toy) -> None:
    path = build(toy)
    rewrite(path, lambda files: None)
    toy.do("wheel", "verify", str(path))


@pytest.mark.parametrize(
    "name",
    [
        "vllm/envs.py",
        "vllm/rows/__init__.py",
        "vllm/ignored.py",
        "vllm/third_party.py",
        "vllm/_version.py",
        "vllm/_C.abi3.so",
        "vllm/data.json",
        f"{DIST_INFO}/METADATA",
        f"{DIST_INFO}/WHEEL",
        f"{DIST_INFO}/entry_points.txt",
        f"{DIST_INFO}/sboms/vllm-routed-experts.cdx.json",
    ],
)
def test_one_changed_byte_is_found(toy: Toy, name: str) -> None:
    path = build(toy)

    def flip(files: Files) -> None:
        data = bytearray(files[name])
        data[len(data) // 2] ^= 1
        files[name] = bytes(data)

    rewrite(path, flip)
    error = toy.refuse("wheel", "verify", str(path))
    assert ("changed", name) in deviations(error)
    assert deviations(error) == {("changed", name), ("changed", f"{DIST_INFO}/RECORD")}


# A new file, which is stored, and the base wheel's kernels, which are compressed.
@pytest.mark.parametrize("name", ["vllm/envs.py", "vllm/_C.abi3.so"])
def test_one_flipped_byte_of_the_file_is_found(toy: Toy, name: str) -> None:
    path = build(toy)
    data = bytearray(path.read_bytes())
    with zipfile.ZipFile(path) as wheel:
        info = wheel.getinfo(name)
    # Past the local header: thirty bytes, then the name, then nothing.
    data[info.header_offset + 30 + len(name) + info.compress_size // 4] ^= 1
    path.write_bytes(data)
    assert ("unreadable", name) in deviations(toy.refuse("wheel", "verify", str(path)))


def test_a_wrong_record_is_found(toy: Toy) -> None:
    path = build(toy)
    files = contents(path)
    record = f"{DIST_INFO}/RECORD"
    files[record] = files[record].replace(b"sha256=", b"sha512=", 1)
    with zipfile.ZipFile(path, "w") as wheel:
        for name, data in files.items():
            wheel.writestr(name, data)
    error = toy.refuse("wheel", "verify", str(path))
    assert deviations(error) == {("changed", record)}


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("missing", "vllm/rows/__init__.py"),
        ("extra", "vllm/extra.py"),
        ("extra", "other/extra.py"),
        ("extra", f"{DIST_INFO}/extra"),
        ("extra", "vllm/old.py"),  # which the series deletes
    ],
)
def test_a_missing_or_an_extra_file_is_found(toy: Toy, kind: str, name: str) -> None:
    path = build(toy)
    edit = dict.pop if kind == "missing" else dict.__setitem__
    rewrite(path, lambda files: edit(files, name, b"extra\n"))
    assert (kind, name) in deviations(toy.refuse("wheel", "verify", str(path)))


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_a_member_that_stands_twice_is_found(toy: Toy) -> None:
    path = build(toy)
    with zipfile.ZipFile(path, "a") as wheel:
        wheel.writestr("vllm/envs.py", (toy.tree / "vllm/envs.py").read_bytes())
    error = toy.refuse("wheel", "verify", str(path))
    assert deviations(error) == {("stands more than once", "vllm/envs.py")}


def test_a_wheel_without_one_patch_is_found(toy: Toy, tmp_path: Path) -> None:
    other = toy.copy(tmp_path / "short")
    other.do("series", "apply", "--before", NAMES[2])
    other.do("series", "export", "--drop", NAMES[2])
    found = deviations(toy.refuse("wheel", "verify", str(build(other))))
    assert {("changed", "vllm/data.json"), ("extra", "vllm/old.py")} <= found
    assert ("changed", f"{DIST_INFO}/sboms/vllm-routed-experts.cdx.json") in found


def test_a_patch_whose_message_alone_differs_is_found(toy: Toy, tmp_path: Path) -> None:
    other = toy.copy(tmp_path / "reworded")
    other.edit_patch(NAMES[0], "a user sees rows", "a user sees Rows")
    other.do("series", "apply")
    found = deviations(toy.refuse("wheel", "verify", str(build(other))))
    sbom = f"{DIST_INFO}/sboms/vllm-routed-experts.cdx.json"
    assert found == {("changed", sbom), ("changed", f"{DIST_INFO}/RECORD")}


def test_a_changed_patch_is_refused_before_anything_is_compared(toy: Toy) -> None:
    path = build(toy)
    toy.edit_patch(NAMES[0], "a user sees rows", "a user sees Rows")
    assert "not the applied series" in toy.refuse("wheel", "verify", str(path))


def test_a_pristine_wheel_does_not_pass_for_a_patched_one(toy: Toy) -> None:
    toy.do("series", "apply", "--pristine")
    path = build(toy)
    toy.do("series", "apply")
    assert "does not go with the build tree" in toy.refuse("wheel", "verify", str(path))


@pytest.mark.parametrize(
    "name",
    [
        f"vllm-9.8.7-{TAG}.whl",
        f"vllm-9.8.7+re.3.rocm-{TAG}.whl",
        f"vllm-1.1.1+re.3.cpu-{TAG}.whl",
        f"vllm-9.8.7+other-{TAG}.whl",
    ],
)
def test_a_version_that_is_not_ours_is_refused(toy: Toy, name: str) -> None:
    path = build(toy).rename(toy.root / name)
    assert "not one of this project's" in toy.refuse("wheel", "verify", str(path))


def test_a_wheel_with_another_tag_is_found(toy: Toy) -> None:
    path = build(toy).rename(toy.root / f"vllm-{CPU}-py3-none-any.whl")
    assert "file name" in toy.refuse("wheel", "verify", str(path))


def test_a_file_that_is_no_wheel_is_refused(toy: Toy) -> None:
    (toy.root / f"vllm-{CPU}-{TAG}.whl").write_text("no zip")
    for name in (f"vllm-{CPU}-{TAG}.whl", "README.md", f"vllm-{CPU}-py3-none-any.whl"):
        assert "this is not a wheel" in toy.refuse("wheel", "verify", str(toy.root / name))


def test_an_installed_wheel_passes_with_what_an_installer_adds(toy: Toy) -> None:
    site = install(build(toy), toy.root / "site")
    assert "15 files" in toy.do("wheel", "verify", "--installed", str(site))


def test_an_installed_wheel_of_another_machine_is_compared_with_its_own_base(toy: Toy) -> None:
    path = build(toy, variant="cuda-aarch64")
    site = toy.root / "site"
    with zipfile.ZipFile(path) as wheel:
        wheel.extractall(site)
    toy.do("wheel", "verify", "--installed", str(site))
    stated = site / f"vllm-{VERSION}+re.3.dist-info" / "WHEEL"
    stated.write_text(stated.read_text().replace("aarch64", "x86_64"))
    found = deviations(toy.refuse("wheel", "verify", "--installed", str(site)))
    assert ("changed", "vllm/_C.abi3.so") in found


def test_an_installed_wheel_is_found_by_its_python(
    toy: Toy, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = install(build(toy), toy.root / "site")
    monkeypatch.setattr(
        "tools.wheel.verify.find_site", lambda place: {sys.executable: site}[str(place)]
    )
    assert "15 files" in toy.do("wheel", "verify", "--installed")


def test_a_virtual_environment_names_its_site(tmp_path: Path) -> None:
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.write_text(f"#!/bin/sh\necho {tmp_path}/site\n")
    python.chmod(0o755)
    assert find_site(tmp_path) == find_site(python) == tmp_path / "site"


@pytest.mark.parametrize("name", ["vllm/envs.py", "vllm/_C.abi3.so", f"{DIST_INFO}/METADATA"])
def test_an_edited_installed_file_is_found(toy: Toy, name: str) -> None:
    site = install(build(toy), toy.root / "site")
    with (site / name).open("ab") as file:
        file.write(b" ")
    error = toy.refuse("wheel", "verify", "--installed", str(site))
    assert deviations(error) == {("changed", name)}


def test_a_missing_and_an_extra_installed_file_are_found(toy: Toy) -> None:
    site = install(build(toy), toy.root / "site")
    (site / "vllm/envs.py").rename(site / "vllm/other.py")
    error = toy.refuse("wheel", "verify", "--installed", str(site))
    assert deviations(error) == {("missing", "vllm/envs.py"), ("extra", "vllm/other.py")}


def test_a_wrong_installed_record_is_found(toy: Toy) -> None:
    site = install(build(toy), toy.root / "site")
    record = site / DIST_INFO / "RECORD"
    record.write_text(record.read_text().replace("vllm/envs.py,sha256=", "vllm/envs.py,sha256=x"))
    error = toy.refuse("wheel", "verify", "--installed", str(site))
    assert deviations(error) == {("RECORD", "vllm/envs.py")}


def test_a_site_without_vllm_is_refused(toy: Toy) -> None:
    (toy.root / "site").mkdir()
    assert "vllm is not installed" in toy.refuse(
        "wheel", "verify", "--installed", str(toy.root / "site")
    )
