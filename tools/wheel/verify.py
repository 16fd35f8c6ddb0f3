# SPDX-License-Identifier: Apache-2.0
"""Proof that a wheel, or what was installed from it, is the base wheel plus the series."""

import argparse
import sysconfig
import tempfile
from email.parser import Parser
from importlib.metadata import distributions
from pathlib import Path
from zipfile import ZipFile

from tools.common.cli import Problems, ToolError, add_tree
from tools.common.files import digest_of
from tools.common.pin import Project
from tools.wheel.build import build_wheel
from tools.wheel.plan import PACKAGE, base_of, tree_series

# What an installer adds beside the wheel's own files.
_INSTALLERS_OWN = {"INSTALLER", "REQUESTED", "direct_url.json", "uv_cache.json"}
# Where packages of this Python lie.
SITE = Path(sysconfig.get_path("platlib"))


def declare(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("wheels", nargs="*", type=Path, metavar="WHEEL")
    text = "the installed wheel, in this package directory (default: this Python's)"
    parser.add_argument("--installed", nargs="?", type=Path, const=SITE, metavar="SITE", help=text)
    add_tree(parser)


def run(arguments: argparse.Namespace, project: Project) -> None:
    """Prove that a wheel is the base wheel plus the series. It is built once more, from the pinned
    base wheel and the build tree. A wheel must have the same bytes. An installed wheel must have
    the same files. Without arguments: what lies in build/<line>/wheels."""
    wheels, place = arguments.wheels, arguments.installed
    if not wheels and place is None:
        wheels = sorted(project.wheels.glob("*.whl"))
        if not wheels:
            step = "python -m tools wheel build --variant cpu"
            raise ToolError("there is no wheel to verify", where=project.wheels, next_step=step)
    proofs = [verify_wheel(project, wheel) for wheel in wheels]
    for proof in [*proofs, *([verify_installed(project, place)] if place else [])]:
        print(f"verified: {proof}")


def verify_wheel(project: Project, path: Path) -> str:
    """Compare a wheel with what it must be. Returns what was proved."""
    if not path.is_file():
        raise ToolError("there is no such wheel", where=path)
    _, series = tree_series(project)
    base = base_of(project.pin, path.name, project.release if series else 0)
    with tempfile.TemporaryDirectory() as folder:
        right = build_wheel(project, base.variant, Path(folder))
        expected, found = (f"sha256 {digest_of(wheel)}" for wheel in (right, path))
    if expected != found:
        what = "this wheel is not the base wheel plus the series"
        raise ToolError(what, path, expected, found, "build it again")
    return f"{path.name}: {found}, {len(series)} patches"


def verify_installed(project: Project, site: Path) -> str:
    """Compare every installed file with the file in the wheel. Returns what was proved."""
    installed = list(distributions(name=PACKAGE, path=[str(site)]))
    if len(installed) != 1:
        what = f"{PACKAGE} is {'installed twice' if installed else 'not installed here'}"
        found = ", ".join(each.version for each in installed) or "none"
        raise ToolError(what, site, f"one {PACKAGE}-*.dist-info", found, "make install")
    _, series = tree_series(project)
    # Wheels for several machines have one version: the tag tells which this is.
    tag = Parser().parsestr(installed[0].read_text("WHEEL") or "")["Tag"]
    dist_info = f"{PACKAGE}-{installed[0].version}.dist-info"
    name = f"{dist_info.removesuffix('.dist-info')}-{tag}.whl"
    base = base_of(project.pin, name, project.release if series else 0)
    files = {
        path.relative_to(site).as_posix(): path
        for top in (PACKAGE, dist_info)
        for path in (site / top).rglob("*")
        if (path.is_file() or path.is_symlink()) and "__pycache__" not in path.parts
    }
    ours = files.keys() - {f"{dist_info}/{name}" for name in _INSTALLERS_OWN}
    with (
        tempfile.TemporaryDirectory() as folder,
        ZipFile(build_wheel(project, base.variant, Path(folder))) as right,
    ):
        wanted = right.namelist()
        problems = [ToolError("extra", name) for name in sorted(ours - set(wanted))]
        for name in wanted:
            if name not in files:
                problems.append(ToolError("missing", name))
            # An installer adds lines to RECORD.
            elif not name.endswith("/RECORD") and files[name].read_bytes() != right.read(name):
                problems.append(ToolError("changed", name))
    what = f"{PACKAGE} {installed[0].version} in {site}"
    if problems:
        raise Problems(
            f"{what} is not the base wheel plus the series; deviations", problems=problems
        )
    return f"{what}: {len(wanted)} files, {len(series)} patches"
