# SPDX-License-Identifier: Apache-2.0
"""Proof that a wheel, or what was installed from it, is the base wheel plus the series."""

import argparse
import hashlib
import sysconfig
import zipfile
import zlib
from collections.abc import Callable, Collection, Iterator
from email.parser import Parser
from importlib.metadata import distributions
from pathlib import Path

from packaging.tags import Tag, parse_tag
from packaging.utils import InvalidWheelFilename, parse_wheel_filename

from tools.common.cli import Problems, ToolError, add_downloads, add_tree
from tools.common.pin import Project
from tools.source.fetch import fetch
from tools.wheel.plan import PACKAGE, Plan, plan_wheel, read_wheel_version, tree_series

# What an installer adds beside the wheel's own files.
_INSTALLERS_OWN = {"INSTALLER", "REQUESTED", "direct_url.json", "uv_cache.json"}
# Where packages of this Python lie.
SITE = Path(sysconfig.get_path("platlib"))


def declare(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("wheels", nargs="*", type=Path, metavar="WHEEL")
    text = "the installed wheel, in this package directory (default: this Python's)"
    parser.add_argument("--installed", nargs="?", type=Path, const=SITE, metavar="SITE", help=text)
    add_tree(parser)
    add_downloads(parser)


def run(arguments: argparse.Namespace, project: Project) -> None:
    """Prove that a wheel is the base wheel plus the series. Every Python file equals the patched
    tree's, every other file the base wheel's, RECORD is right, and only name, version, tags and
    requirements on local versions differ in the metadata. Without arguments: what lies in
    build/<line>/wheels."""
    wheels, place = arguments.wheels, arguments.installed
    if not wheels and place is None:
        wheels = sorted(project.wheels.glob("*.whl"))
        if not wheels:
            step = "python -m tools wheel build --variant cpu"
            raise ToolError("there is no wheel to verify", where=project.wheels, next_step=step)
    proofs = [verify_wheel(project, wheel) for wheel in wheels]
    for proof in [*proofs, *([verify_installed(project, place)] if place else [])]:
        print(f"verified: {proof}")


def _plan_for(project: Project, version: str, tags: Collection[Tag]) -> tuple[Plan, int]:
    """What a wheel of this version must be, from tree and base wheel alone; count of patches."""
    base, release = read_wheel_version(project.pin, version, tags)
    git, series = tree_series(project)
    if bool(series) != bool(release):
        what = "the version does not go with the build tree"
        expected = "release 0 for the pristine tree, 1 and up for a patched one"
        found = f"release {release}, {len(series)} patches"
        raise ToolError(what, version, expected, found, "python -m tools series apply")
    with zipfile.ZipFile(fetch(base.file, project)) as wheel:
        return plan_wheel(wheel, base, git, project.pin, series, release), len(series)


def _deviations(
    plan: Plan, there: Collection[str], read: Callable[[str], bytes]
) -> Iterator[ToolError]:
    """How the files that are there deviate from the plan; nothing when they do not."""
    wanted = {member.name: member for member in plan.members}
    for name, member in wanted.items():
        expected, what = f"sha256 {member.sha256.hex()}", "changed"
        try:
            digest = f"sha256 {hashlib.sha256(read(name)).hexdigest()}"
        except KeyError:
            what, digest = "missing", "nothing"
        except (zipfile.BadZipFile, zlib.error) as error:
            what, digest = "unreadable", str(error)
        if digest != expected:
            yield ToolError(what, name, f"{expected}, from {member.why}", digest)
    for name in sorted(set(there) - wanted.keys()):
        yield ToolError("extra", name, "no such file")


def _conclude(what: str, plan: Plan, patches: int, found: list[ToolError]) -> str:
    """What was proved; ``found`` are the deviations."""
    if found:
        raise Problems(f"{what} is not the base wheel plus the series; deviations", problems=found)
    patched = sum(member.data is not None for member in plan.members)
    files = f"{len(plan.members)} files, {patched} of them not the base wheel's"
    return f"{what}: {files}, {patches} patches"


def verify_wheel(project: Project, path: Path) -> str:
    """Compare every member of a wheel file with what it must be; what was proved."""
    try:
        _, version, _, tags = parse_wheel_filename(path.name)
        archive = zipfile.ZipFile(path)
    except (InvalidWheelFilename, zipfile.BadZipFile, FileNotFoundError) as error:
        raise ToolError("this is not a wheel", path, found=error) from error
    with archive:
        plan, patches = _plan_for(project, str(version), tags)
        names = archive.namelist()
        found = list(_deviations(plan, names, archive.read))
        if path.name != plan.filename:
            found.append(ToolError("file name", path, plan.filename, path.name))
        for name in sorted({name for name in names if names.count(name) > 1}):
            found.append(ToolError("stands more than once", name, "once"))
    return _conclude(path.name, plan, patches, found)


def verify_installed(project: Project, site: Path) -> str:
    """Compare every installed file with what the wheel must hold; what was proved."""
    installed = list(distributions(name=PACKAGE, path=[str(site)]))
    if len(installed) != 1:
        what = f"{PACKAGE} is {'installed twice' if installed else 'not installed here'}"
        found = ", ".join(each.version for each in installed) or "none"
        raise ToolError(what, site, f"one {PACKAGE}-*.dist-info", found, "make install")
    version = installed[0].version
    # Wheels for several machines have one version: the tags tell which this is.
    tags = Parser().parsestr(installed[0].read_text("WHEEL") or "").get_all("Tag", [])
    plan, patches = _plan_for(project, version, {tag for text in tags for tag in parse_tag(text)})
    files = {
        path.relative_to(site).as_posix(): path
        for top in (PACKAGE, plan.dist_info)
        for path in (site / top).rglob("*")
        if (path.is_file() or path.is_symlink()) and "__pycache__" not in path.parts
    }
    ours = files.keys() - {f"{plan.dist_info}/{name}" for name in _INSTALLERS_OWN}
    record = f"{plan.dist_info}/RECORD"
    compared = _deviations(plan, ours, lambda name: files[name].read_bytes())
    # An installer adds lines to RECORD.
    deviations = [e for e in compared if e.where != record or e.what == "missing"]
    return _conclude(f"{PACKAGE} {version} in {site}", plan, patches, deviations)
