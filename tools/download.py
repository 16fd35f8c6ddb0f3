# SPDX-License-Identifier: Apache-2.0
"""Pinned files: from a wheelhouse, or found by unearth and downloaded; kept only if they agree.

A download that was cut off goes on where it stopped, with the next command.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from unearth import Link, PackageFinder

from tools.errors import ToolError
from tools.pin import Downloads, PinnedFile

_CHUNK = 1 << 20
_SPARE = 64 << 20  # bytes that must stay free beside the file itself

Advance = Callable[[int], None]


def digest_of(path: Path) -> str:
    """The sha256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def check_file(path: Path, pinned: PinnedFile) -> None:
    """Refuse a file that is not the pinned one; the file is left as it is."""
    next_step = f"delete it, then run the command again: rm {path}"
    size = path.stat().st_size
    if size != pinned.size:
        raise ToolError(
            "a downloaded file has the wrong size",
            where=path,
            expected=f"{pinned.size} bytes",
            found=f"{size} bytes",
            next_step=next_step,
        )
    digest = digest_of(path)
    if digest != pinned.sha256:
        raise ToolError(
            "a downloaded file has the wrong digest",
            where=path,
            expected=f"sha256 {pinned.sha256}",
            found=f"sha256 {digest}",
            next_step=next_step,
        )


def need_space(directory: Path, size: int) -> None:
    """Refuse to begin writing a file for which there is no room."""
    free = shutil.disk_usage(directory).free
    if free < size + _SPARE:
        raise ToolError(
            "not enough free disk space",
            where=directory,
            expected=f"{size + _SPARE} bytes",
            found=f"{free} bytes",
            next_step="free some space, then run the command again",
        )


def fetch(pinned: PinnedFile, downloads: Downloads, advance: Advance = lambda count: None) -> Path:
    """The pinned file: of the wheelhouse, of an earlier download, or downloaded now.

    ``advance`` is called with the number of bytes just written, or found from a download that was
    cut off.
    """
    target = downloads.directory / pinned.filename
    house = downloads.wheelhouse
    for path in [*([house / pinned.filename] if house else []), target]:
        if path.exists():
            check_file(path, pinned)
            return path
    if downloads.offline:
        raise ToolError(
            "a pinned file is not here, and the network may not be asked",
            where=" or ".join(str(place) for place in (house, downloads.directory) if place),
            expected=f"{pinned.filename}, sha256 {pinned.sha256}",
            next_step="put it there, name the directory that has it (--wheelhouse DIR), "
            "or leave out --offline",
        )
    downloads.directory.mkdir(parents=True, exist_ok=True)
    partial = downloads.directory / f".{pinned.filename}.part"
    with _alone(partial) as out:
        if target.exists():  # another process had the lock, and was faster
            check_file(target, pinned)
            partial.unlink()
            return target
        digest, size = _download(pinned, out, advance)
        if (size, digest) != (pinned.size, pinned.sha256):
            partial.unlink()
            raise ToolError(
                "the package index gave a file that is not the pinned one",
                where=pinned.filename,
                expected=f"sha256 {pinned.sha256}, {pinned.size} bytes",
                found=f"sha256 {digest}, {size} bytes",
                next_step="nothing was kept; try another index: PIP_INDEX_URL=...",
            )
        partial.chmod(0o644)
        partial.replace(target)
    return target


@contextmanager
def _alone(path: Path) -> Iterator[BinaryIO]:
    """The file, to read and to append to, held by one process at a time; removed if left empty."""
    while True:
        file = path.open("a+b")
        fcntl.flock(file, fcntl.LOCK_EX)
        if path.exists() and path.stat().st_ino == os.fstat(file.fileno()).st_ino:
            break
        file.close()  # whoever had the lock has renamed or removed it
    with file:
        try:
            yield file
        finally:
            if os.fstat(file.fileno()).st_size == 0:
                path.unlink(missing_ok=True)


def _download(pinned: PinnedFile, out: BinaryIO, advance: Advance) -> tuple[str, int]:
    """Complete a file that may hold the beginning already; return its sha256 and size."""
    out.seek(0)
    digest, size = hashlib.sha256(), 0
    if os.fstat(out.fileno()).st_size < pinned.size:
        while chunk := out.read(_CHUNK):
            digest.update(chunk)
            size += len(chunk)
    else:
        out.truncate(0)
    need_space(Path(out.name).parent, pinned.size - size)
    try:
        link, finder = _find(pinned)
        with _opened(link, finder, size) as (start, chunks):
            if start != size:  # this server gives whole files only
                out.truncate(0)
                digest, size = hashlib.sha256(), 0
            if size:
                advance(size)
            for chunk in chunks:
                out.write(chunk)
                digest.update(chunk)
                size += len(chunk)
                advance(len(chunk))
    except (OSError, ToolError):
        raise
    except Exception as error:  # every transport has its own errors
        raise ToolError(
            "a download failed",
            where=pinned.filename,
            found=f"{type(error).__name__}: {error}",
            next_step="check the network and PIP_INDEX_URL, then run the command again: "
            f"it goes on at byte {size}",
        ) from error
    finally:
        out.flush()
    return digest.hexdigest(), size


def _find(pinned: PinnedFile) -> tuple[Link, PackageFinder]:
    # The digest decides, so any mirror will do; without one unearth knows its own default index.
    index = os.environ.get("PIP_INDEX_URL")
    finder = PackageFinder(index_urls=[index] if index else [], ignore_compatibility=True)
    for package in finder.find_all_packages(pinned.distribution, allow_yanked=True):
        if package.link.filename == pinned.filename:
            return package.link, finder
    raise ToolError(
        "the package index does not have the pinned file",
        where=f"distribution {pinned.distribution}",
        expected=pinned.filename,
        next_step="check the network and PIP_INDEX_URL",
    )


@contextmanager
def _opened(link: Link, finder: PackageFinder, skip: int) -> Iterator[tuple[int, Iterator[bytes]]]:
    """Where the bytes begin, at ``skip`` or at 0 where a server cannot skip, and the bytes."""
    if link.is_file:
        with link.file_path.open("rb") as file:
            file.seek(skip)
            yield skip, iter(lambda: file.read(_CHUNK), b"")
        return
    headers = {"Accept-Encoding": "identity"}  # half of a compressed answer is of no use
    if skip:
        headers["Range"] = f"bytes={skip}-"
    with finder.session.get_stream(link.normalized, headers=headers) as response:
        response.raise_for_status()
        partly = response.headers.get("Content-Range", "").startswith(f"bytes {skip}-")
        # As the bytes come: a chunk that is waited for would be lost with the connection.
        yield skip if partly else 0, response.iter_bytes()
