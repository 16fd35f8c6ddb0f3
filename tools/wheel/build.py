# SPDX-License-Identifier: Apache-2.0
"""Building the patched wheel."""

import argparse
import copy
import struct
from pathlib import Path
from zipfile import ZIP_STORED, ZipFile, ZipInfo

from tools.common.cli import add_path, add_tree
from tools.common.files import digest_of, replacing
from tools.common.pin import Project
from tools.source.fetch import fetch
from tools.wheel.plan import Member, choose_base, plan_wheel, tree_series, wheel_name

_DATE = (1980, 1, 1, 0, 0, 0)  # the zip format's first


def declare(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--variant", required=True, help="a base wheel: cpu, cuda or cuda-aarch64")
    add_tree(parser)
    add_path(parser, "--out", "where it goes (default: build/<line>/wheels)")


def run(arguments: argparse.Namespace, project: Project) -> None:
    """Lay the applied series over the pinned base wheel. The result is reproducible: pin, series
    and release number decide every byte. Refuses a build tree that is not the applied series, and
    a series that changes compiled sources: an overlay cannot carry those."""
    path = build_wheel(project, arguments.variant, arguments.out or project.wheels)
    base = project.pin.wheels[arguments.variant]
    _, series = tree_series(project)
    print(f"base: {base.file.filename} ({base.trusted_by})")
    if base.tests_only:
        print(f"for tests only: the Python of vLLM {project.pin.version} over these kernels")
    print(f"wheel: {path} ({len(series)} patches)")
    print(f"size: {path.stat().st_size}")
    print(f"sha256: {digest_of(path)}")


def build_wheel(project: Project, variant: str, out: Path) -> Path:
    """Build the wheel of the applied series into ``out``, completely or not at all."""
    base = choose_base(project.pin, variant)
    git, series = tree_series(project)
    # Release 0 is the name of a wheel without patches.
    number = project.release if series else 0
    with ZipFile(fetch(base.file, project)) as wheel:
        members = plan_wheel(wheel, base, git, project.pin, series, number)
        path = out / wheel_name(project.pin, base, number)
        with replacing(path) as file, ZipFile(file, "w", allowZip64=False) as new:
            for member in members:
                _add(new, member, wheel)
    return path


def _add(new: ZipFile, member: Member, wheel: ZipFile) -> None:
    """Write one member of a plan."""
    if member.data is None:
        assert member.info is not None
        _copy_raw(wheel, member.info, new, member.name)
        return
    info = ZipInfo(member.name, _DATE)
    info.create_system = 3
    info.external_attr = member.info.external_attr if member.info else 0o100644 << 16
    # Stored, not deflated: a compressor's output depends on its version.
    new.writestr(info, member.data, ZIP_STORED)


def _copy_raw(wheel: ZipFile, info: ZipInfo, new: ZipFile, name: str) -> None:
    """Copy a member's compressed bytes as they are, under a new header."""
    source, out = wheel.fp, new.fp
    assert source is not None
    assert out is not None
    source.seek(info.header_offset)
    name_length, extra_length = struct.unpack("<HH", source.read(30)[26:30])
    source.seek(info.header_offset + 30 + name_length + extra_length)
    fresh = copy.copy(info)
    fresh.filename = fresh.orig_filename = name
    fresh.date_time = _DATE
    fresh.extra = fresh.comment = b""
    fresh.create_system = 3
    fresh.flag_bits &= ~0x08  # sizes stand in the header, not behind the data
    fresh.header_offset = new.start_dir
    out.seek(new.start_dir)
    out.write(fresh.FileHeader(zip64=False))
    for start in range(0, info.compress_size, 1 << 20):
        out.write(source.read(min(info.compress_size - start, 1 << 20)))
    new.start_dir = out.tell()
    new.filelist.append(fresh)
    new.NameToInfo[name] = fresh
