# SPDX-License-Identifier: Apache-2.0
"""The room of the patched wheels."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from tools.commands.common import Room, add_downloads, add_series, add_tree, progress
from tools.compile import compile_wheel
from tools.errors import ToolError
from tools.pin import Project
from tools.series import fingerprint, read_series
from tools.verify import verify_installed, verify_wheel
from tools.wheel import Built, build_wheel, choose_base, wheel_version


def add(parent: argparse._SubParsersAction) -> None:
    room = Room(parent, "wheel", "wheels: the base wheel with the series laid over it")

    parser = room.verb("build", build, "--variant cpu --out build/wheels")
    parser.add_argument("--variant", required=True, help="a base wheel: cpu, cuda or cuda-aarch64")
    add_tree(parser)
    add_series(parser)
    parser.add_argument("--out", type=Path, help="where it goes (default: build/wheels)")
    parser.add_argument(
        "--release",
        type=_release,
        metavar="N",
        help="the release number (default: [project].version of pyproject.toml)",
    )
    parser.add_argument(
        "--from-source",
        nargs="?",
        type=Path,
        const=Path(sys.executable),
        metavar="PYTHON",
        help="compile, with this Python's torch and build requirements (default: this Python)",
    )
    add_downloads(parser)

    parser = room.verb("identity", identity, "--variant cuda")
    parser.add_argument("--variant", required=True, help="a base wheel: cpu, cuda or cuda-aarch64")
    add_series(parser)

    parser = room.verb("verify", verify, "--installed .venv/bin/python")
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


def _release(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("a release number is 1 or more; 0 is the pristine wheel")
    return number


def build(arguments: argparse.Namespace, project: Project) -> int:
    """Lay the applied series over the pinned base wheel. The result is reproducible: pin, series
    and release number decide every byte. Refuses a build tree that is not the applied series, and
    a series that changes compiled sources: those need --from-source, on a machine with the CUDA
    toolkit, vLLM's build requirements and the network (this project never ran that to its end)."""
    base = choose_base(project.pin, arguments.variant)
    if arguments.from_source:
        compiled = compile_wheel(
            project,
            arguments.variant,
            arguments.tree or project.tree,
            arguments.series or project.series_file,
            arguments.out or project.wheels,
            python=arguments.from_source,
            release=arguments.release,
        )
        _tell(compiled)
        return 0
    with progress(base.file) as advance:
        built = build_wheel(
            project,
            arguments.variant,
            arguments.tree or project.tree,
            arguments.series or project.series_file,
            arguments.out or project.wheels,
            release=arguments.release,
            advance=advance,
        )
    print(f"base: {base.file.filename} ({base.trusted_by})")
    _tell(built)
    return 0


def _tell(built: Built) -> None:
    print(f"wheel: {built.path} ({built.patches} patches)")
    print(f"size: {built.size}")
    print(f"sha256: {built.sha256}")


def identity(arguments: argparse.Namespace, project: Project) -> int:
    """Print what a wheel of the series is called and made from, as NAME=value lines: the pin, the
    fingerprint of the series, the version. The image's labels say the same."""
    pin = project.pin
    base = choose_base(pin, arguments.variant)
    series = read_series(arguments.series or project.series_file)
    print(f"PIN={pin.git_tag}@{pin.commit}")
    print(f"SERIES_FINGERPRINT={fingerprint(series, pin)}")
    print(f"WHEEL_VERSION={wheel_version(pin, base, project.release if series else 0)}")
    return 0


def verify(arguments: argparse.Namespace, project: Project) -> int:
    """Prove that a wheel is the base wheel plus the series. Every Python file equals the patched
    tree's, every other file the base wheel's, RECORD is right, and only name, version, tags and
    requirements on local versions differ in the metadata. Without arguments: what lies in
    build/wheels."""
    tree = arguments.tree or project.tree
    series_file = arguments.series or project.series_file
    wheels = arguments.wheels
    if not wheels and arguments.installed is None:
        wheels = sorted(project.wheels.glob("*.whl"))
        if not wheels:
            raise ToolError(
                "there is no wheel to verify",
                where=project.wheels,
                next_step="python -m tools wheel build --variant cpu",
            )
    proofs = [verify_wheel(project, wheel, tree, series_file) for wheel in wheels]
    if arguments.installed is not None:
        proofs.append(verify_installed(project, arguments.installed, tree, series_file))
    for proof in proofs:
        print(
            f"verified: {proof.what}: {proof.files} files, {proof.patched} of them not the base "
            f"wheel's, {proof.patches} patches"
        )
    return 0
