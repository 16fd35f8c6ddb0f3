# SPDX-License-Identifier: Apache-2.0
"""What every member of the patched wheel must be: the base wheel with the series laid over it.

``build`` writes this plan, ``verify`` compares a wheel with it. The bytes of the result depend on
pin, series and release number alone.
"""

import base64
import csv
import hashlib
import io
import zipfile
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from pathlib import PurePosixPath

from packaging.tags import Tag, parse_tag
from packaging.utils import parse_wheel_filename
from packaging.version import Version

from tools.common.errors import ToolError
from tools.common.git import Git
from tools.common.pin import BaseWheel, Pin, Project
from tools.series.series import Series, fingerprint, read_series
from tools.series.tree import BASE_REF, Record, open_settled, read_record
from tools.wheel.metadata import mark_for_tests, name_metadata, name_version_module, name_wheel
from tools.wheel.sbom import make_sbom

PACKAGE = "vllm"
VERSION_MODULE = f"{PACKAGE}/_version.py"

# An overlay cannot change what is made of these: kernels, and the wheel's own metadata.
BUILD_INPUTS = (
    *("CMakeLists.txt", "MANIFEST.in", "cmake/", "csrc/", "pyproject.toml", "setup.py"),
    *(f"requirements/{name}.txt" for name in ("common", "cpu", "cuda")),
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
    if not found:
        expected = dict.fromkeys(wheel_version(pin, base, 1) for base in pin.wheels.values())
        what = "this version is not one of this project's overlays on this pin"
        raise ToolError(what, expected=" or ".join(expected), found=version)
    return next((base for base in found if parse_tag(base.tag) & set(tags)), found[0]), number


def tree_series(project: Project) -> tuple[Git, Series]:
    """The build tree, and the series that its HEAD is the result of: empty on the base."""
    git = open_settled(project)
    tree = git.tree_id("HEAD")
    if tree == git.tree_id(BASE_REF):
        return git, Series()
    series = read_series(project.series_file)
    if read_record(git) != Record(fingerprint(series, project.pin), tree):
        raise ToolError(
            "the build tree is not the applied series",
            where=git.path,
            found=git.log("HEAD"),
            next_step="python -m tools series apply, or series export to keep your commits",
        )
    return git, series


def choose_base(pin: Pin, variant: str) -> BaseWheel:
    if variant not in pin.wheels:
        expected, step = " or ".join(pin.wheels), "name one of these: --variant"
        what = "the pin has no such base wheel"
        raise ToolError(what, found=variant, expected=expected, next_step=step)
    return pin.wheels[variant]


def plan_wheel(
    wheel: zipfile.ZipFile, base: BaseWheel, git: Git, pin: Pin, series: Series, release: int
) -> Plan:
    """What every member of the patched wheel must be.

    Refuses a series that changes what only a real build can turn into a wheel.
    """
    changes = {change.path for change in git.changes(BASE_REF, "HEAD")}
    if touched := sorted(path for path in changes if path.startswith(BUILD_INPUTS)):
        raise ToolError(
            "the series changes compiled sources or build inputs, which an overlay on a finished "
            "wheel cannot carry",
            where=git.path,
            found=", ".join(touched),
            next_step="take these changes out of the series",
        )
    version = wheel_version(pin, base, release)
    filename = f"{PACKAGE}-{version}-{base.tag}.whl"
    parse_wheel_filename(filename)
    infos = [info for info in wheel.infolist() if not info.is_dir()]
    old_dist_info, dist_info = _dist_info(infos, base), f"{PACKAGE}-{version}.dist-info"
    tree = git.files("HEAD", PACKAGE)
    # What the base wheel lacks or has in another version.
    fresh = tree.keys() if base.tests_only else changes & tree.keys()
    patched = git.contents(tree[name] for name in fresh)
    package, metadata = [], []
    for info in infos:
        name = info.filename
        if name.startswith(f"{old_dist_info}/"):
            inner = name.removeprefix(f"{old_dist_info}/")
            if inner in ("METADATA", "WHEEL"):
                text = _rename(inner, wheel.read(info).decode(), version, base, pin)
                metadata.append(
                    _new(f"{dist_info}/{inner}", text.encode(), f"the new {inner}", info)
                )
            elif not inner.startswith("RECORD"):  # nor its signatures, which are no longer true
                metadata.append(_kept(wheel, info, f"{dist_info}/{inner}"))
        elif name == VERSION_MODULE:
            text = name_version_module(wheel.read(info).decode(), version)
            package.append(_new(name, text.encode(), "the generated version module", info))
        elif name in fresh:
            package.append(_new(name, patched[tree[name]], "patched tree", info))
        elif name in tree and name.endswith(".py"):
            # Edits that the base wheel has beyond the release are left out.
            if _blob_id(wheel.read(info)) == tree[name]:
                package.append(replace(_kept(wheel, info, name), why="patched tree"))
            else:
                data = git.contents([tree[name]])[tree[name]]
                package.append(_new(name, data, "patched tree", info))
        elif name not in changes and (_is_kernel(name) or not base.tests_only):
            package.append(_kept(wheel, info, name))
    there = {info.filename for info in infos}
    for name in sorted(fresh - there):
        package.append(_new(name, patched[tree[name]], "patched tree"))
    sbom = make_sbom(pin, base, series, version)
    name = f"{dist_info}/sboms/vllm-routed-experts.cdx.json"
    members = [*package, *metadata, _new(name, sbom, "the bill of materials")]
    record = io.StringIO()
    writer = csv.writer(record, lineterminator="\n")
    writer.writerows(member.record() for member in members)
    writer.writerow((f"{dist_info}/RECORD", "", ""))
    members.append(_new(f"{dist_info}/RECORD", record.getvalue().encode(), "its own members"))
    return Plan(version, filename, tuple(members))


def _dist_info(infos: Iterable[zipfile.ZipInfo], base: BaseWheel) -> str:
    tops = {info.filename.split("/")[0] for info in infos}
    found = [top for top in tops if top.endswith(".dist-info")]
    if len(found) != 1 or any(top.endswith(".data") for top in tops):
        what, expected = "the base wheel is not laid out as expected", "one .dist-info, no .data"
        raise ToolError(what, base.file.filename, expected, ", ".join(sorted(tops)))
    return found[0]


def _is_kernel(name: str) -> bool:
    return PurePosixPath(name).suffix == ".so" or ".so." in name


def _blob_id(data: bytes) -> str:
    """The id that git gives these bytes; saves reading thousands of equal files from it."""
    return hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()


def _new(name: str, data: bytes, why: str, info: zipfile.ZipInfo | None = None) -> Member:
    return Member(name, hashlib.sha256(data).digest(), len(data), data, info, why)


def _kept(wheel: zipfile.ZipFile, info: zipfile.ZipInfo, name: str) -> Member:
    with wheel.open(info) as file:
        digest = hashlib.file_digest(file, "sha256").digest()  # type: ignore[arg-type]
    return Member(name, digest, info.file_size, None, info, "base wheel")


def _rename(inner: str, text: str, version: str, base: BaseWheel, pin: Pin) -> str:
    """METADATA or WHEEL of the base wheel, with what names the patched one."""
    if inner == "WHEEL":
        return name_wheel(text, base.tag)
    text = name_metadata(text, PACKAGE, version)
    return mark_for_tests(text, pin.version, base.file.filename) if base.tests_only else text
