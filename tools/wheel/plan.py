# SPDX-License-Identifier: Apache-2.0
"""What every member of the patched wheel is: the base wheel with the series laid over it. The bytes
depend on pin, series and release number alone."""

import base64
import csv
import hashlib
import io
import re
import uuid
from datetime import UTC, datetime
from typing import NamedTuple
from zipfile import ZipFile, ZipInfo

from cyclonedx.model import HashAlgorithm, HashType, Property
from cyclonedx.model.bom import Bom
from cyclonedx.model.component import Component, ComponentType
from cyclonedx.output import make_outputter
from cyclonedx.schema import OutputFormat, SchemaVersion
from packaging.tags import parse_tag
from packaging.version import Version

from tools.common.cli import ToolError
from tools.common.git import Git
from tools.common.pin import BaseWheel, Pin, Project
from tools.series.series import Series, fingerprint, read_series
from tools.series.tree import BASE_REF, open_settled, read_record, record

PACKAGE = "vllm"
VERSION_MODULE = f"{PACKAGE}/_version.py"

_KERNEL = re.compile(r"\.so(\.|$)")
# An overlay cannot change what is made of these: kernels, front end, and the metadata of the wheel.
BUILD_INPUTS = (
    *("CMakeLists.txt", "MANIFEST.in", "cmake/", "csrc/", "pyproject.toml", "rust/", "setup.py"),
    *(f"requirements/{name}.txt" for name in ("common", "cpu", "cuda")),
)


class Member(NamedTuple):
    """A file of the wheel: new bytes, or the bytes of the member ``info`` of the base wheel."""

    name: str
    data: bytes | None
    info: ZipInfo | None = None

    def record(self, wheel: ZipFile) -> tuple[str, str, int]:
        """Its line in RECORD."""
        data = self.data
        if data is None:
            assert self.info is not None
            data = wheel.read(self.info)
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        return self.name, f"sha256={digest}", len(data)


def wheel_version(pin: Pin, base: BaseWheel, release: int) -> str:
    """The version of the patched wheel: upstream's with a local part of ours."""
    parts = ("re", str(release), base.local_suffix, "tests" if base.tests_only else "")
    return str(Version(f"{pin.version}+{'.'.join(filter(None, parts))}"))


def wheel_name(pin: Pin, base: BaseWheel, release: int) -> str:
    return f"{PACKAGE}-{wheel_version(pin, base, release)}-{base.tag}.whl"


def base_of(pin: Pin, name: str, release: int) -> BaseWheel:
    """The base wheel of a patched wheel that has this name."""
    names = {wheel_name(pin, base, release): base for base in pin.wheels.values()}
    if name not in names:
        what = "this is not the name of a wheel of this series and this release"
        raise ToolError(what, expected=" or ".join(names), found=name)
    return names[name]


def tree_series(project: Project) -> tuple[Git, Series]:
    """The build tree, and the series that its HEAD is the result of: empty on the base."""
    git = open_settled(project)
    if git.tree_id("HEAD") == git.tree_id(BASE_REF):
        return git, Series()
    series = read_series(project.series_file)
    if read_record(git) != record(git, series, project.pin):
        what, found = "the build tree is not the applied series", git.log("HEAD")
        step = "python -m tools series apply, or series export to keep your commits"
        raise ToolError(what, where=git.path, found=found, next_step=step)
    return git, series


def choose_base(pin: Pin, variant: str) -> BaseWheel:
    if variant not in pin.wheels:
        expected = " or ".join(pin.wheels)
        raise ToolError("the pin has no such base wheel", "--variant", expected, variant)
    return pin.wheels[variant]


def plan_wheel(
    wheel: ZipFile, base: BaseWheel, git: Git, pin: Pin, series: Series, release: int
) -> list[Member]:
    """Every member of the patched wheel in order; RECORD comes last.

    Refuses a series that changes what only a real build can turn into a wheel.
    """
    changes = set(git.changed(BASE_REF, "HEAD"))
    if touched := sorted(path for path in changes if path.startswith(BUILD_INPUTS)):
        what = "an overlay on a finished wheel cannot change compiled sources or build inputs"
        found, step = ", ".join(touched), "take these changes out of the series"
        raise ToolError(what, where=git.path, found=found, next_step=step)
    version = wheel_version(pin, base, release)
    infos = [info for info in wheel.infolist() if not info.is_dir()]
    old_dist_info = "-".join(base.file.filename.split("-")[:2]) + ".dist-info"
    dist_info = f"{PACKAGE}-{version}.dist-info"
    # tree_series made sure that the work tree has the files of HEAD.
    tree = {name: (git.path / name).read_bytes() for name in git.files("HEAD", PACKAGE)}
    # What the base wheel lacks or has in another version.
    fresh = tree.keys() if base.tests_only else changes & tree.keys()
    package, metadata = [], []
    for info in infos:
        name = info.filename
        if name.startswith(f"{old_dist_info}/"):
            inner = name.removeprefix(f"{old_dist_info}/")
            data = None
            if inner in ("METADATA", "WHEEL"):
                edit = _name_metadata if inner == "METADATA" else _name_wheel
                data = edit(wheel.read(info).decode(), version, base).encode()
            if not inner.startswith("RECORD"):  # nor its signatures, which are no longer true
                metadata.append(Member(f"{dist_info}/{inner}", data, info))
        elif name == VERSION_MODULE:
            text = _name_version_module(wheel.read(info).decode(), version)
            package.append(Member(name, text.encode(), info))
        elif name in fresh or (name in tree and name.endswith(".py")):
            # Edits that the base wheel has beyond the release are left out.
            is_kept = name not in fresh and wheel.read(info) == tree[name]
            package.append(Member(name, None if is_kept else tree[name], info))
        elif name not in changes and (not base.tests_only or _KERNEL.search(name)):
            package.append(Member(name, None, info))
    there = {info.filename for info in infos}
    package += [Member(name, tree[name]) for name in sorted(fresh - there)]
    sbom = make_sbom(pin, base, series, version)
    name = f"{dist_info}/sboms/vllm-routed-experts.cdx.json"
    members = [*package, *metadata, Member(name, sbom)]
    name, out = f"{dist_info}/RECORD", io.StringIO()
    rows = [member.record(wheel) for member in members]
    csv.writer(out, lineterminator="\n").writerows([*rows, (name, "", "")])
    return [*members, Member(name, out.getvalue().encode())]


def _replace(text: str, pattern: str, line: str) -> str:
    new, count = re.subn(pattern, lambda _: line, text, flags=re.MULTILINE)
    if count != 1:
        what = "the base wheel has not exactly one line like this"
        raise ToolError(what, expected=pattern, found=count)
    return new


def _name_metadata(text: str, version: str, base: BaseWheel) -> str:
    """METADATA of the patched wheel: new name and version, no requirement on a local version.

    Over kernels of another version it says that the wheel is for tests, and no index accepts it.
    """
    head, blank, body = text.partition("\n\n")
    head = _replace(head, r"^Name: .*$", "Name: vllm")
    head = _replace(head, r"^Version: .*$", f"Version: {version}")
    # A package index has no local versions (torch==2.1+cpu): without this nothing installs.
    head = re.sub(r"^(Requires-Dist: [^;\n]*==\s*[\w.]+)\+[\w.]+", r"\1", head, flags=re.MULTILINE)
    if base.tests_only:
        head = re.sub(r"^Summary: .*\n?", "", head, flags=re.MULTILINE).rstrip("\n")
        said = f"the Python of vLLM {version.partition('+')[0]} over the kernels of"
        head += f"\nSummary: FOR TESTS ONLY: {said} {base.file.filename}"
        head += "\nClassifier: Private :: Do Not Upload"
    return head + blank + body


def _name_wheel(text: str, version: str, base: BaseWheel) -> str:
    """WHEEL with the tags that the file name states."""
    lines = [line for line in text.rstrip("\n").split("\n") if not line.startswith("Tag: ")]
    lines += [f"Tag: {one}" for one in sorted(map(str, parse_tag(base.tag)))]
    return "\n".join(lines) + "\n"


def _name_version_module(text: str, version: str) -> str:
    """``_version.py`` with the version of the wheel's name."""
    parsed = Version(version)
    parts = (*parsed.release, *([parsed.local] if parsed.local else []))
    values = {"__version__ = version": version, "__version_tuple__ = version_tuple": parts}
    for name, value in values.items():
        text = _replace(text, rf"^{name} = .*$", f"{name} = {value!r}")
    return text


# The zip format's first date: the bytes must not depend on when the wheel is made.
_DATE = datetime(1980, 1, 1, tzinfo=UTC)


def make_sbom(pin: Pin, base: BaseWheel, series: Series, version: str) -> bytes:
    """The bill of materials: source archive, base wheel and every patch, by digest."""
    key = f"{fingerprint(series, pin)} {base.file.sha256} {version}"
    bom = Bom(serial_number=uuid.uuid5(uuid.NAMESPACE_URL, key))
    bom.metadata.timestamp = _DATE
    wheel = Component(name="vllm", version=version, type=ComponentType.LIBRARY, bom_ref="wheel")
    bom.metadata.component = wheel

    def add(name: str, sha256: str, **facts: str) -> None:
        part = Component(
            name=name,
            type=ComponentType.FILE,
            bom_ref=name,
            hashes=[HashType(alg=HashAlgorithm.SHA_256, content=sha256)],
            properties=[
                Property(name=f"vllm-routed-experts:{k}", value=v) for k, v in facts.items()
            ],
        )
        bom.components.add(part)
        bom.register_dependency(wheel, [part])

    source, below = pin.source, base.file
    add(source.filename, source.sha256, role="source archive", commit=pin.commit)
    add(below.filename, below.sha256, role="base wheel", trusted_by=base.trusted_by)
    for number, patch in enumerate(series, start=1):
        digest = hashlib.sha256(patch.data).hexdigest()
        add(f"patches/{pin.line}/{patch.name}", digest, role="patch", position=str(number))
    text = make_outputter(bom, OutputFormat.JSON, SchemaVersion.V1_6).output_as_string(indent=2)
    return text.encode() + b"\n"
