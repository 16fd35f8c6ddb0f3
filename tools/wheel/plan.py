# SPDX-License-Identifier: Apache-2.0
"""What every member of the patched wheel must be: the base wheel with the series laid over it.

Building writes the plan down and verifying compares with it. The bytes of the result depend on pin,
series and release number alone.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import zipfile
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath

from packaging.tags import Tag, parse_tag
from packaging.utils import parse_wheel_filename
from packaging.version import Version

from tools.common.errors import ToolError
from tools.common.git import Git
from tools.common.pin import BaseWheel, Pin, Project
from tools.series.base import BASE_REF
from tools.series.series import Series, fingerprint, read_series
from tools.series.tree import Record, read_record, refuse_dirt, refuse_unfinished
from tools.wheel.metadata import mark_for_tests, name_metadata, name_version_module, name_wheel
from tools.wheel.sbom import make_sbom

PACKAGE = "vllm"
VERSION_MODULE = f"{PACKAGE}/_version.py"

# An overlay changes none of what these make: kernels, and the wheel's own metadata.
BUILD_INPUTS = (
    "CMakeLists.txt",
    "MANIFEST.in",
    "cmake/",
    "csrc/",
    "pyproject.toml",
    "requirements/common.txt",
    "requirements/cpu.txt",
    "requirements/cuda.txt",
    "setup.py",
)


@dataclass(frozen=True)
class Member:
    """A file of the wheel: new bytes, or the member ``info`` of the base wheel."""

    name: str
    sha256: bytes
    size: int
    data: bytes | None = None
    info: zipfile.ZipInfo | None = None
    why: str = "base"  # whose file it must equal

    def record(self) -> tuple[str, str, str]:
        digest = base64.urlsafe_b64encode(self.sha256).rstrip(b"=").decode()
        return self.name, f"sha256={digest}", str(self.size)


@dataclass(frozen=True)
class Plan:
    """Every member in order; RECORD comes last."""

    version: str
    filename: str
    members: tuple[Member, ...]

    @property
    def dist_info(self) -> str:
        return f"{PACKAGE}-{self.version}.dist-info"


def wheel_version(pin: Pin, base: BaseWheel, release: int) -> str:
    """The version of the patched wheel: upstream's with a local part of ours."""
    parts = ("re", str(release), base.local_suffix, "tests" if base.tests_only else "")
    return str(Version(f"{pin.version}+{'.'.join(filter(None, parts))}"))


def read_wheel_version(pin: Pin, version: str, tags: Collection[Tag]) -> tuple[BaseWheel, int]:
    """Base wheel and release number that a version of ours names.

    Base wheels of several machines give one version; the tags decide between those.
    """
    parts = (Version(version).local or "").split(".")
    number = int(parts[1]) if len(parts) > 1 and parts[1].isdigit() else 0
    found = [base for base in pin.wheels.values() if version == wheel_version(pin, base, number)]
    for base in found:
        if parse_tag(base.tag) & set(tags):
            return base, number
    if found:
        return found[0], number
    expected = dict.fromkeys(wheel_version(pin, base, 1) for base in pin.wheels.values())
    raise ToolError(
        "this version is not one of this project's overlays on this pin",
        expected=" or ".join(expected),
        found=version,
    )


def tree_series(git: Git, project: Project, series_file: Path) -> Series:
    """The series that the tree's HEAD is the result of: empty on the base, else the line's."""
    refuse_unfinished(git)
    refuse_dirt(git)
    tree = git.tree_id("HEAD")
    if tree == git.tree_id(BASE_REF):
        return Series()
    series = read_series(series_file)
    found = read_record(git)
    if found != Record(fingerprint(series, project.pin), tree):
        raise ToolError(
            "the build tree is not the applied series",
            where=git.path,
            expected=f"the result of {series_file}",
            found=git.oneline("HEAD"),
            next_step="python -m tools series apply, or series export to keep your commits",
        )
    return series


def choose_base(pin: Pin, variant: str) -> BaseWheel:
    if variant not in pin.wheels:
        raise ToolError(
            "the pin has no such base wheel",
            found=variant,
            expected=" or ".join(pin.wheels),
            next_step="name one of these: --variant",
        )
    return pin.wheels[variant]


def refuse_build_inputs(git: Git) -> None:
    """Refuse a series that changes what only a real build can turn into a wheel."""
    touched = [
        change.path
        for change in git.changes(BASE_REF, "HEAD")
        if change.path.startswith(BUILD_INPUTS)
    ]
    if touched:
        raise ToolError(
            "the series changes compiled sources or build inputs, which an overlay on a finished "
            "wheel cannot carry",
            where=git.path,
            found=", ".join(touched),
            next_step="take these changes out of the series",
        )


def plan_wheel(
    wheel: zipfile.ZipFile, base: BaseWheel, git: Git, pin: Pin, series: Series, release: int
) -> Plan:
    """What every member of the patched wheel must be."""
    refuse_build_inputs(git)
    version = wheel_version(pin, base, release)
    filename = f"{PACKAGE}-{version}-{base.tag}.whl"
    parse_wheel_filename(filename)
    infos = [info for info in wheel.infolist() if not info.is_dir()]
    old_dist_info = _dist_info(infos, base)
    new_dist_info = f"{PACKAGE}-{version}.dist-info"
    tree = git.files("HEAD", PACKAGE)
    changes = {change.path for change in git.changes(BASE_REF, "HEAD")}
    # What the base wheel lacks or has in another version.
    fresh = tree.keys() if base.tests_only else changes & tree.keys()
    patched = git.contents(tree[name].blob for name in fresh)
    package, metadata = [], []
    for info in infos:
        name = info.filename
        if name.startswith(f"{old_dist_info}/"):
            member = _metadata_member(wheel, info, old_dist_info, new_dist_info, version, base, pin)
            metadata += [member] if member else []
        elif name == VERSION_MODULE:
            text = name_version_module(wheel.read(info).decode(), version)
            package.append(_new(name, text.encode(), "the generated version module", info))
        elif name in fresh:
            package.append(_new(name, patched[tree[name].blob], "patched tree", info))
        elif name in tree and name.endswith(".py"):
            # The base wheel's own edits of the release do not come along.
            if _blob_id(wheel.read(info)) == tree[name].blob:
                package.append(replace(_kept(wheel, info, name), why="patched tree"))
            else:
                data = git.contents([tree[name].blob])[tree[name].blob]
                package.append(_new(name, data, "patched tree", info))
        elif name not in changes and (_is_kernel(name) or not base.tests_only):
            package.append(_kept(wheel, info, name))
    there = {info.filename for info in infos}
    for name in sorted(fresh - there):
        package.append(_new(name, patched[tree[name].blob], "patched tree"))
    metadata.append(
        _new(
            f"{new_dist_info}/sboms/vllm-routed-experts.cdx.json",
            make_sbom(pin, base, series, version),
            "the bill of materials",
        )
    )
    members = [*package, *metadata]
    record = io.StringIO()
    writer = csv.writer(record, lineterminator="\n")
    writer.writerows(member.record() for member in members)
    writer.writerow((f"{new_dist_info}/RECORD", "", ""))
    members.append(_new(f"{new_dist_info}/RECORD", record.getvalue().encode(), "its own members"))
    return Plan(version, filename, tuple(members))


def _dist_info(infos: Iterable[zipfile.ZipInfo], base: BaseWheel) -> str:
    tops = {info.filename.split("/")[0] for info in infos}
    found = [top for top in tops if top.endswith(".dist-info")]
    if len(found) != 1 or any(top.endswith(".data") for top in tops):
        raise ToolError(
            "the base wheel is not laid out as expected",
            where=base.file.filename,
            expected="one .dist-info directory and no .data",
            found=", ".join(sorted(tops)),
        )
    return found[0]


def _is_kernel(name: str) -> bool:
    return PurePosixPath(name).suffix == ".so" or ".so." in name


def _blob_id(data: bytes) -> str:
    """What git calls these bytes: spares reading thousands of equal files from it."""
    return hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()


def _new(name: str, data: bytes, why: str, info: zipfile.ZipInfo | None = None) -> Member:
    return Member(name, hashlib.sha256(data).digest(), len(data), data, info, why)


def _kept(wheel: zipfile.ZipFile, info: zipfile.ZipInfo, name: str) -> Member:
    with wheel.open(info) as file:
        digest = hashlib.file_digest(file, "sha256").digest()  # type: ignore[arg-type]
    return Member(name, digest, info.file_size, None, info, "base wheel")


def _metadata_member(
    wheel: zipfile.ZipFile,
    info: zipfile.ZipInfo,
    old: str,
    new: str,
    version: str,
    base: BaseWheel,
    pin: Pin,
) -> Member | None:
    inner = info.filename.removeprefix(f"{old}/")
    name = f"{new}/{inner}"
    if inner == "METADATA":
        text = name_metadata(wheel.read(info).decode(), PACKAGE, version)
        if base.tests_only:
            text = mark_for_tests(text, pin.version, base.file.filename)
        return _new(name, text.encode(), "the renamed metadata", info)
    if inner == "WHEEL":
        text = name_wheel(wheel.read(info).decode(), base.tag)
        return _new(name, text.encode(), "the retagged metadata", info)
    if inner.startswith("RECORD"):  # also its signatures, which would no longer be true
        return None
    return _kept(wheel, info, name)
