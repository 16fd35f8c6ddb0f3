# SPDX-License-Identifier: Apache-2.0
"""Building the patched wheel."""

from __future__ import annotations

import argparse
import copy
import hashlib
import os
import struct
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from tools.common.cli import add_downloads, add_series, add_tree, series_of, tree_of
from tools.common.errors import ToolError
from tools.common.files import replacing
from tools.common.pin import Project
from tools.series.tree import open_tree
from tools.source.download import fetch, need_space
from tools.wheel.plan import Plan, choose_base, plan_wheel, refuse_build_inputs, tree_series

EXAMPLE = "--variant cpu --out build/v0.20.2/wheels"

_DATE = (1980, 1, 1, 0, 0, 0)  # the zip format's first


def declare(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--variant", required=True, help="a base wheel: cpu, cuda or cuda-aarch64")
    add_tree(parser)
    add_series(parser)
    parser.add_argument("--out", type=Path, help="where it goes (default: build/<line>/wheels)")
    parser.add_argument(
        "--release",
        type=_release,
        metavar="N",
        help="the release number (default: [project].version of pyproject.toml)",
    )
    add_downloads(parser)


def _release(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("a release number is 1 or more; 0 is the pristine wheel")
    return number


def run(arguments: argparse.Namespace, project: Project) -> None:
    """Lay the applied series over the pinned base wheel. The result is reproducible: pin, series
    and release number decide every byte. Refuses a build tree that is not the applied series, and
    a series that changes compiled sources: an overlay cannot carry those."""
    base = choose_base(project.pin, arguments.variant)
    built = build_wheel(
        project,
        arguments.variant,
        tree_of(arguments, project),
        series_of(arguments, project),
        arguments.out or project.wheels,
        release=arguments.release,
    )
    print(f"base: {base.file.filename} ({base.trusted_by})")
    if base.tests_only:
        print(f"for tests only: the Python of vLLM {project.pin.version} over these kernels")
    print(f"wheel: {built.path} ({built.patches} patches)")
    print(f"size: {built.size}")
    print(f"sha256: {built.sha256}")


@dataclass(frozen=True)
class Built:
    """A wheel on disk."""

    path: Path
    size: int
    sha256: str
    patches: int


def build_wheel(
    project: Project,
    variant: str,
    tree: Path,
    series_file: Path,
    out: Path,
    *,
    release: int | None = None,
) -> Built:
    """Build the wheel of the applied series into ``out``, completely or not at all."""
    base = choose_base(project.pin, variant)
    git = open_tree(tree, project.pin)
    series = tree_series(git, project, series_file)
    # Release 0 is the name of a wheel without patches.
    number = (release or project.release) if series else 0
    refuse_build_inputs(git)
    base_path = fetch(base.file, project)
    out.mkdir(parents=True, exist_ok=True)
    need_space(out, base.file.size)
    with zipfile.ZipFile(base_path) as wheel:
        plan = plan_wheel(wheel, base, git, project.pin, series, number)
        path = out / plan.filename
        with replacing(path) as file:
            write_wheel(plan, wheel, file)
            size = file.seek(0, os.SEEK_END)
            file.seek(0)
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    return Built(path, size, digest, len(series))


def write_wheel(plan: Plan, wheel: zipfile.ZipFile, out: IO[bytes]) -> None:
    """Write the members of a plan as a zip archive."""
    with zipfile.ZipFile(out, "w", zipfile.ZIP_STORED, allowZip64=False) as new:
        for member in plan.members:
            if member.data is None:
                assert member.info is not None
                _copy_raw(wheel, member.info, new, member.name)
                continue
            info = zipfile.ZipInfo(member.name, _DATE)
            info.create_system = 3
            info.external_attr = (
                member.info.external_attr if member.info is not None else 0o100644 << 16
            )
            # Stored, not deflated: a compressor's output depends on its version.
            new.writestr(info, member.data, zipfile.ZIP_STORED)


def _copy_raw(
    wheel: zipfile.ZipFile, info: zipfile.ZipInfo, new: zipfile.ZipFile, name: str
) -> None:
    """Copy a member's compressed bytes as they are, under a new header."""
    source, out = wheel.fp, new.fp
    assert source is not None
    assert out is not None
    source.seek(info.header_offset)
    header = source.read(30)
    name_length, extra_length = struct.unpack("<HH", header[26:30])
    source.seek(info.header_offset + 30 + name_length + extra_length)
    fresh = copy.copy(info)
    fresh.filename = fresh.orig_filename = name
    fresh.date_time = _DATE
    fresh.extra = b""
    fresh.comment = b""
    fresh.create_system = 3
    fresh.flag_bits &= ~0x08  # sizes stand in the header, not behind the data
    fresh.header_offset = new.start_dir
    out.seek(new.start_dir)
    out.write(fresh.FileHeader(zip64=False))
    left = info.compress_size
    while left:
        chunk = source.read(min(left, 1 << 20))
        if not chunk:
            raise ToolError("the base wheel ends in the middle of a member", where=info.filename)
        out.write(chunk)
        left -= len(chunk)
    new.start_dir = out.tell()
    new.filelist.append(fresh)
    new.NameToInfo[name] = fresh
