# SPDX-License-Identifier: Apache-2.0
"""Pinned downloads: found by unearth, hashed while they are written, kept only if they agree."""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from unearth import PackageFinder

from tools.errors import ToolError
from tools.pin import PinnedFile

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


def fetch(pinned: PinnedFile, into: Path, advance: Advance = lambda count: None) -> Path:
    """The pinned file in ``into``: the one already there, or downloaded now.

    ``advance`` is called with the number of bytes just written.
    """
    target = into / pinned.filename
    if target.exists():
        check_file(target, pinned)
        return target
    into.mkdir(parents=True, exist_ok=True)
    need_space(into, pinned.size)
    handle, name = tempfile.mkstemp(prefix=f".{pinned.filename}.", dir=into)
    partial = Path(name)
    try:
        with os.fdopen(handle, "wb") as out:
            digest, size = _stream(pinned, out.write, advance)
        if (size, digest) != (pinned.size, pinned.sha256):
            raise ToolError(
                "the package index gave a file that is not the pinned one",
                where=pinned.filename,
                expected=f"sha256 {pinned.sha256}, {pinned.size} bytes",
                found=f"sha256 {digest}, {size} bytes",
                next_step="nothing was kept; try another index: PIP_INDEX_URL=...",
            )
        partial.chmod(0o644)
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)
    return target


def _stream(
    pinned: PinnedFile, write: Callable[[bytes], object], advance: Advance
) -> tuple[str, int]:
    """Write the file's bytes as they come; return their sha256 and number."""
    digest, size = hashlib.sha256(), 0
    # The digest decides, so any mirror will do; without one unearth knows its own default index.
    index = os.environ.get("PIP_INDEX_URL")
    finder = PackageFinder(index_urls=[index] if index else [], ignore_compatibility=True)
    try:
        link = next(
            (
                package.link
                for package in finder.find_all_packages(pinned.distribution, allow_yanked=True)
                if package.link.filename == pinned.filename
            ),
            None,
        )
        if link is None:
            raise ToolError(
                "the package index does not have the pinned file",
                where=f"distribution {pinned.distribution}",
                expected=pinned.filename,
                next_step="check the network and PIP_INDEX_URL",
            )
        if link.is_file:
            with link.file_path.open("rb") as file:
                while chunk := file.read(_CHUNK):
                    write(chunk)
                    digest.update(chunk)
                    size += len(chunk)
                    advance(len(chunk))
        else:
            with finder.session.get_stream(link.normalized) as response:
                response.raise_for_status()
                for chunk in response.iter_bytes(_CHUNK):
                    write(chunk)
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
            next_step="check the network and PIP_INDEX_URL, then run the command again",
        ) from error
    return digest.hexdigest(), size
