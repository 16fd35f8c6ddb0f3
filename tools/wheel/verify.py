# SPDX-License-Identifier: Apache-2.0
"""Proof that a wheel, or what was installed from it, is the base wheel plus the series."""

from __future__ import annotations

import argparse
import csv
import hashlib
import io
import subprocess
import sys
import zipfile
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from packaging.tags import Tag, parse_tag
from packaging.utils import InvalidWheelFilename, parse_wheel_filename

from tools.common.cli import add_downloads, add_series, add_tree, series_of, tree_of
from tools.common.errors import Problems, ToolError
from tools.common.pin import Project
from tools.series.series import Series
from tools.series.tree import open_tree
from tools.source.download import fetch
from tools.wheel.plan import (
    PACKAGE,
    Member,
    Plan,
    plan_wheel,
    read_wheel_version,
    tree_series,
)

EXAMPLE = "--installed .venv/bin/python"

# What an installer adds beside the wheel's own files.
_INSTALLERS_OWN = {"INSTALLER", "REQUESTED", "direct_url.json", "uv_cache.json"}


def declare(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("wheels", nargs="*", type=Path, metavar="WHEEL")
    parser.add_argument(
        "--installed",
        nargs="?",
        type=Path,
        const=Path(sys.executable),
        metavar="PYTHON_OR_SITE",
        help="an installed wheel: by its Python, virtual environment or package directory "
        "(default: this Python)",
    )
    add_tree(parser)
    add_series(parser)
    add_downloads(parser)


def run(arguments: argparse.Namespace, project: Project) -> None:
    """Prove that a wheel is the base wheel plus the series. Every Python file equals the patched
    tree's, every other file the base wheel's, RECORD is right, and only name, version, tags and
    requirements on local versions differ in the metadata. Without arguments: what lies in
    build/<line>/wheels."""
    where = (tree_of(arguments, project), series_of(arguments, project))
    wheels = arguments.wheels
    if not wheels and arguments.installed is None:
        wheels = sorted(project.wheels.glob("*.whl"))
        if not wheels:
            raise ToolError(
                "there is no wheel to verify",
                where=project.wheels,
                next_step="python -m tools wheel build --variant cpu",
            )
    proofs = [verify_wheel(project, wheel, *where) for wheel in wheels]
    if arguments.installed is not None:
        proofs.append(verify_installed(project, arguments.installed, *where))
    for proof in proofs:
        print(
            f"verified: {proof.what}: {proof.files} files, {proof.patched} of them not the base "
            f"wheel's, {proof.patches} patches"
        )


@dataclass(frozen=True)
class Verified:
    """A proof that held."""

    what: str
    files: int
    patched: int
    patches: int


def _plan_for(
    project: Project, tree: Path, series_file: Path, version: str, tags: Collection[Tag]
) -> tuple[Plan, Series]:
    """What a wheel of this version must be, from tree and base wheel alone."""
    base, release = read_wheel_version(project.pin, version, tags)
    git = open_tree(tree, project.pin)
    series = tree_series(git, project, series_file)
    if bool(series) != bool(release):
        raise ToolError(
            "the version does not go with the build tree",
            where=version,
            expected="release 0 for the pristine tree, 1 and up for a patched one",
            found=f"release {release}, {len(series)} patches",
            next_step="python -m tools series apply",
        )
    path = fetch(base.file, project)
    with zipfile.ZipFile(path) as wheel:
        return plan_wheel(wheel, base, git, project.pin, series, release), series


def _difference(member: Member, data: bytes | None) -> ToolError | None:
    """How a file deviates from the plan; None when it does not."""
    if data is None:
        return ToolError(
            "missing", where=member.name, expected=f"sha256 {member.sha256.hex()}", found="nothing"
        )
    digest = hashlib.sha256(data).hexdigest()
    if digest == member.sha256.hex():
        return None
    return ToolError(
        "changed",
        where=member.name,
        expected=f"sha256 {member.sha256.hex()}, from {member.why}",
        found=f"sha256 {digest}",
    )


def _extra(names: Iterable[str]) -> list[ToolError]:
    return [ToolError("extra", where=name, expected="no such file") for name in sorted(names)]


def _conclude(what: str, plan: Plan, series: Series, deviations: list[ToolError]) -> Verified:
    if deviations:
        raise Problems(f"{what} is not the base wheel plus the series; deviations", deviations)
    patched = sum(member.data is not None for member in plan.members)
    return Verified(what, len(plan.members), patched, len(series))


def verify_wheel(project: Project, path: Path, tree: Path, series_file: Path) -> Verified:
    """Compare every member of a wheel file with what it must be."""
    try:
        _, version, _, tags = parse_wheel_filename(path.name)
        archive = zipfile.ZipFile(path)
    except (InvalidWheelFilename, zipfile.BadZipFile, FileNotFoundError) as error:
        raise ToolError("this is not a wheel", where=path, found=error) from error
    with archive:
        plan, series = _plan_for(project, tree, series_file, str(version), tags)
        deviations = []
        if path.name != plan.filename:
            deviations.append(
                ToolError("file name", where=path, expected=plan.filename, found=path.name)
            )
        names = archive.namelist()
        for member in plan.members:
            try:
                data = archive.read(member.name) if member.name in names else None
            except zipfile.BadZipFile as error:
                deviations.append(ToolError("unreadable", where=member.name, found=error))
                continue
            if problem := _difference(member, data):
                deviations.append(problem)
        wanted = {member.name for member in plan.members}
        deviations += _extra(set(names) - wanted)
        deviations += [
            ToolError("stands more than once", where=name, expected="once")
            for name in sorted({name for name in names if names.count(name) > 1})
        ]
    return _conclude(path.name, plan, series, deviations)


def find_site(place: Path) -> Path:
    """The directory that packages lie in, of a Python, a virtual environment or itself."""
    python = place
    if place.is_dir():
        python = place / "bin" / "python"
        if not python.exists():
            return place
    if not python.exists():
        raise ToolError("there is no such Python and no such directory", where=place)
    # -I: the place must not depend on the caller's PYTHONPATH.
    command = [str(python), "-I", "-c", "import sysconfig; print(sysconfig.get_path('platlib'))"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ToolError(
            "this Python does not say where its packages are",
            where=place,
            details=done.stderr.splitlines(),
        )
    return Path(done.stdout.strip())


def _installed_tags(dist_info: Path) -> frozenset[Tag]:
    """The tags that an installed wheel states; none where it does not."""
    path = dist_info / "WHEEL"
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    stated = [line.removeprefix("Tag: ") for line in lines if line.startswith("Tag: ")]
    return frozenset(tag for text in stated if text.count("-") == 2 for tag in parse_tag(text))


def verify_installed(project: Project, place: Path, tree: Path, series_file: Path) -> Verified:
    """Compare every installed file with what the wheel must hold."""
    site = find_site(place)
    found = sorted(site.glob(f"{PACKAGE}-*.dist-info"))
    if len(found) != 1:
        raise ToolError(
            f"{PACKAGE} is not installed here" if not found else f"{PACKAGE} is installed twice",
            where=site,
            expected=f"one {PACKAGE}-*.dist-info",
            found=", ".join(path.name for path in found) or "none",
            next_step="make install",
        )
    version = found[0].name.removeprefix(f"{PACKAGE}-").removesuffix(".dist-info")
    plan, series = _plan_for(project, tree, series_file, version, _installed_tags(found[0]))
    record = f"{plan.dist_info}/RECORD"
    deviations = []
    for member in plan.members:
        path = site / member.name
        if member.name == record:
            deviations += _record_deviations(path, plan)
        elif problem := _difference(member, path.read_bytes() if path.is_file() else None):
            deviations.append(problem)
    wanted = {member.name for member in plan.members}
    there = {
        path.relative_to(site).as_posix()
        for top in (PACKAGE, plan.dist_info)
        for path in (site / top).rglob("*")
        if path.is_file() or path.is_symlink()
    }
    ignored = {f"{plan.dist_info}/{name}" for name in _INSTALLERS_OWN}
    deviations += _extra(
        name for name in there - wanted - ignored if "__pycache__" not in PurePosixPath(name).parts
    )
    return _conclude(f"{PACKAGE} {version} in {site}", plan, series, deviations)


def _record_deviations(path: Path, plan: Plan) -> list[ToolError]:
    """RECORD must hold the wheel's own lines; installers add some of their own."""
    if not path.is_file():
        return [ToolError("missing", where=path.name)]
    rows = {row[0]: row[1] for row in csv.reader(io.StringIO(path.read_text())) if len(row) == 3}
    return [
        ToolError(
            "RECORD", where=member.name, expected=member.record()[1], found=rows.get(member.name)
        )
        for member in plan.members[:-1]
        if rows.get(member.name) != member.record()[1]
    ]
