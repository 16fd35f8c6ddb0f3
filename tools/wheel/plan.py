# SPDX-License-Identifier: Apache-2.0
"""What every member of the patched wheel must be: the base wheel with the series laid over it.

``build`` writes this plan, ``verify`` compares a wheel with it. The bytes of the result depend on
pin, series and release number alone.
"""

import base64
import csv
import hashlib
import io
import re
import uuid
from collections.abc import Collection
from datetime import UTC, datetime
from typing import NamedTuple
from zipfile import ZipFile, ZipInfo

from cyclonedx.model import HashAlgorithm, HashType, Property
from cyclonedx.model.bom import Bom
from cyclonedx.model.component import Component, ComponentType
from cyclonedx.output import make_outputter
from cyclonedx.schema import OutputFormat, SchemaVersion
from packaging.tags import Tag, parse_tag
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
    """A file of the wheel: new bytes, or the member ``info`` of the base wheel."""

    name: str
    sha256: bytes
    size: int
    data: bytes | None
    info: ZipInfo | None
    why: str  # whose file it must equal

    def record(self) -> tuple[str, str, str]:
        digest = base64.urlsafe_b64encode(self.sha256).rstrip(b"=").decode()
        return self.name, f"sha256={digest}", str(self.size)


class Plan(NamedTuple):
    """Every member in order; RECORD comes last."""

    filename: str
    dist_info: str
    members: list[Member]


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
        expected, step = " or ".join(pin.wheels), "name one of these: --variant"
        raise ToolError("the pin has no such base wheel", None, expected, variant, step)
    return pin.wheels[variant]


def plan_wheel(
    wheel: ZipFile, base: BaseWheel, git: Git, pin: Pin, series: Series, release: int
) -> Plan:
    """What every member of the patched wheel must be.

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
    tree = git.contents("HEAD", PACKAGE)
    # What the base wheel lacks or has in another version.
    fresh = tree.keys() if base.tests_only else changes & tree.keys()
    package, metadata = [], []
    for info in infos:
        name = info.filename
        if name.startswith(f"{old_dist_info}/"):
            inner = name.removeprefix(f"{old_dist_info}/")
            if inner in ("METADATA", "WHEEL"):
                edit = _name_metadata if inner == "METADATA" else _name_wheel
                text = edit(wheel.read(info).decode(), version, base)
                name = f"{dist_info}/{inner}"
                metadata.append(_new(name, text.encode(), f"the new {inner}", info))
            elif not inner.startswith("RECORD"):  # nor its signatures, which are no longer true
                metadata.append(_kept(wheel, info, f"{dist_info}/{inner}"))
        elif name == VERSION_MODULE:
            text = _name_version_module(wheel.read(info).decode(), version)
            package.append(_new(name, text.encode(), "the generated version module", info))
        elif name in fresh or (name in tree and name.endswith(".py")):
            # Edits that the base wheel has beyond the release are left out.
            if name not in fresh and wheel.read(info) == tree[name]:
                package.append(_kept(wheel, info, name, "patched tree"))
            else:
                package.append(_new(name, tree[name], "patched tree", info))
        elif name not in changes and (not base.tests_only or _KERNEL.search(name)):
            package.append(_kept(wheel, info, name))
    there = {info.filename for info in infos}
    for name in sorted(fresh - there):
        package.append(_new(name, tree[name], "patched tree"))
    sbom = make_sbom(pin, base, series, version)
    name = f"{dist_info}/sboms/vllm-routed-experts.cdx.json"
    members = [*package, *metadata, _new(name, sbom, "the bill of materials")]
    name, out = f"{dist_info}/RECORD", io.StringIO()
    rows = [member.record() for member in members]
    csv.writer(out, lineterminator="\n").writerows([*rows, (name, "", "")])
    members.append(_new(name, out.getvalue().encode(), "its own members"))
    return Plan(f"{PACKAGE}-{version}-{base.tag}.whl", dist_info, members)


def _new(name: str, data: bytes, why: str, info: ZipInfo | None = None) -> Member:
    return Member(name, hashlib.sha256(data).digest(), len(data), data, info, why)


def _kept(wheel: ZipFile, info: ZipInfo, name: str, why: str = "base wheel") -> Member:
    with wheel.open(info) as file:
        digest = hashlib.file_digest(file, "sha256").digest()  # type: ignore[arg-type]
    return Member(name, digest, info.file_size, None, info, why)


def _replace(what: str, text: str, pattern: str, line: str) -> str:
    new, count = re.subn(pattern, lambda _: line, text, flags=re.MULTILINE)
    if count != 1:
        said = f"{what} of the base wheel is not as expected"
        raise ToolError(said, expected=f"one line like {pattern}", found=f"{count} of them")
    return new


def _name_metadata(text: str, version: str, base: BaseWheel) -> str:
    """METADATA of the patched wheel: new name and version, no requirement on a local version.

    Over kernels of another version it says that the wheel is for tests, and no index accepts it.
    """
    head, blank, body = text.partition("\n\n")
    head = _replace("METADATA", head, r"^Name: .*$", "Name: vllm")
    head = _replace("METADATA", head, r"^Version: .*$", f"Version: {version}")
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
        text = _replace("_version.py", text, rf"^{name} = .*$", f"{name} = {value!r}")
    return text


# The zip format's first date: the bytes must not depend on when the wheel is made.
_DATE = datetime(1980, 1, 1, tzinfo=UTC)
# A file that a wheel is made of: name, sha256, and facts.
Input = tuple[str, str, dict[str, str]]


def list_inputs(pin: Pin, base: BaseWheel, series: Series) -> list[Input]:
    """Source archive, base wheel and every patch, in order."""
    source, wheel = pin.source, base.file
    below = {"role": "base wheel", "trusted_by": base.trusted_by}
    found: list[Input] = [
        (source.filename, source.sha256, {"role": "source archive", "commit": pin.commit}),
        (wheel.filename, wheel.sha256, below),
    ]
    for number, patch in enumerate(series, start=1):
        digest, name = hashlib.sha256(patch.data).hexdigest(), f"patches/{pin.line}/{patch.name}"
        found.append((name, digest, {"role": "patch", "position": str(number)}))
    return found


def make_sbom(pin: Pin, base: BaseWheel, series: Series, version: str) -> bytes:
    """The bill of materials: base wheel, source archive and every patch, by digest."""
    key = f"{fingerprint(series, pin)} {base.file.sha256} {version}"
    bom = Bom(serial_number=uuid.uuid5(uuid.NAMESPACE_URL, key))
    bom.metadata.timestamp = _DATE
    wheel = Component(name="vllm", version=version, type=ComponentType.LIBRARY, bom_ref="wheel")
    bom.metadata.component = wheel
    parts = [
        Component(
            name=name,
            type=ComponentType.FILE,
            bom_ref=name,
            hashes=[HashType(alg=HashAlgorithm.SHA_256, content=digest)],
            properties=[
                Property(name=f"vllm-routed-experts:{k}", value=v) for k, v in facts.items()
            ],
        )
        for name, digest, facts in list_inputs(pin, base, series)
    ]
    bom.components.update(parts)
    bom.register_dependency(wheel, parts)
    text = make_outputter(bom, OutputFormat.JSON, SchemaVersion.V1_6).output_as_string(indent=2)
    return text.encode() + b"\n"
