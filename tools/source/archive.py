# SPDX-License-Identifier: Apache-2.0
"""Unpacking a source archive without letting any member out of its directory."""

from __future__ import annotations

import tarfile
from pathlib import Path, PurePosixPath

from tools.common.errors import ToolError


def check_members(archive: Path, members: list[tarfile.TarInfo]) -> str:
    """The one directory that all members lie in; a member that could leave it is refused."""
    tops = set()
    for member in members:
        path = PurePosixPath(member.name)
        inside = not path.is_absolute() and ".." not in path.parts and path.parts
        if not inside or not (member.isfile() or member.isdir()):
            kind = "a link or a device" if inside else "a path outside"
            raise ToolError(
                "a member of the archive leaves the tree",
                where=archive,
                expected="regular files below one directory",
                found=f"{member.name}: {kind}",
                next_step="nothing was unpacked; check [source] in upstream.toml",
            )
        tops.add(path.parts[0])
    if len(tops) != 1:
        raise ToolError(
            "the archive does not hold one directory",
            where=archive,
            expected="1",
            found=", ".join(sorted(tops)) or "nothing",
        )
    return tops.pop()


def unpack(archive: Path, into: Path) -> Path:
    """Unpack into a directory that exists; return the archive's one top directory."""
    with tarfile.open(archive) as tar:
        members = tar.getmembers()
        top = check_members(archive, members)
        # The standard library's own guard stays on as well: two locks, two makers.
        tar.extractall(into, members=members, filter="data")
    return into / top
