# SPDX-License-Identifier: Apache-2.0
"""Pinned files, from a wheelhouse or downloaded; the source, from a submodule or the archive."""

import argparse
import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from tools.common.cli import ToolError, add_downloads
from tools.common.files import digest_of
from tools.common.git import Git
from tools.common.pin import PinnedFile, Project
from tools.source.index import CHECK_NETWORK, Index

EXAMPLE = "--wheelhouse /media/wheels --offline"
declare = add_downloads
_SPARE = 64 << 20  # bytes that must stay free beside the file itself


def run(arguments: argparse.Namespace, project: Project) -> None:
    """Get the pinned source, and print which it is. Uses the submodule if the line has one and it
    is checked out, else the archive: from the wheelhouse, from build/downloads, or downloaded
    there. An interrupted download continues where it stopped. PIP_INDEX_URL names another package
    index."""
    print(f"source: {fetch_source(project)}")


def submodule(project: Project) -> Path | None:
    """The line's submodule if it is checked out; refuses one that is not as pinned."""
    if not (pin := project.pin).submodule:
        return None
    path = project.root / pin.submodule
    update = f"git submodule update --init --checkout {path.name}"
    if not (path / ".git").exists():
        if path.is_dir() and any(path.iterdir()):
            what = "the submodule's directory holds files but no checkout"
            raise ToolError(what, path, next_step=f"empty it, or check it out: {update}")
        return None
    git = Git(path)
    if (head := git.commit_id("HEAD")) != pin.commit:
        what = "the submodule is not at the pinned commit"
        step = f"{update}, or do without it: git submodule deinit {path.name}"
        raise ToolError(what, path, pin.commit, head, step)
    git.refuse_dirt("the submodule is not clean; nothing is ever changed in it")
    return path


def fetch_source(project: Project) -> str:
    """Get the source; return which it is."""
    source = project.pin.source
    if path := submodule(project):
        return f"the submodule {path.name}/ at {project.pin.commit}"
    fetch(source, project)
    return f"the source archive {source.filename}, sha256 {source.sha256}"


def check_file(path: Path, pinned: PinnedFile, next_step: str | None = None) -> None:
    """Refuse a file that is not the pinned one; the file is left as it is."""
    what, expected, found = "size", f"{pinned.size} bytes", f"{path.stat().st_size} bytes"
    if found == expected:
        what, expected = "digest", f"sha256 {pinned.sha256}"
        found = f"sha256 {digest_of(path)}"
    if found != expected:
        what = f"a downloaded file has the wrong {what}: it is not the pinned one"
        step = next_step or f"delete it, then run the command again: rm {path}"
        raise ToolError(what, path, expected, found, step)


def need_space(directory: Path, size: int) -> None:
    """Refuse to write a file that does not fit on the disk."""
    free, need = shutil.disk_usage(directory).free, size + _SPARE
    if free < need:
        what, step = "not enough free disk space", "free some space, then run the command again"
        raise ToolError(what, directory, f"{need} bytes", f"{free} bytes", step)


def fetch(pinned: PinnedFile, project: Project) -> Path:
    """The pinned file: from the wheelhouse, from an earlier download, or downloaded now."""
    places = [place for place in (project.wheelhouse, project.downloads) if place]
    for path in (place / pinned.filename for place in places):
        if path.exists():
            check_file(path, pinned)
            return path
    if project.offline:
        what = "a pinned file is missing, and --offline forbids the network"
        expected = f"{pinned.filename}, sha256 {pinned.sha256}"
        step = "put it there, or name the directory that has it: --wheelhouse DIR"
        raise ToolError(what, " or ".join(map(str, places)), expected, next_step=step)
    target = project.downloads / pinned.filename
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f".{pinned.filename}.part")
    with _alone(target.parent):
        if target.exists():  # another process had the lock, and was faster
            check_file(target, pinned)
            return target
        _download(pinned, partial)
        try:
            check_file(partial, pinned, "nothing was kept; try another index: PIP_INDEX_URL=...")
        except ToolError:
            partial.unlink()
            raise
        partial.replace(target)
    return target


@contextmanager
def _alone(directory: Path) -> Iterator[None]:
    """One process at a time downloads into a directory; the others wait."""
    handle = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _download(pinned: PinnedFile, partial: Path) -> None:
    """Download what an interrupted run left out of ``partial``, with a bar on standard error."""
    have = _size(partial) if _size(partial) < pinned.size else 0
    need_space(partial.parent, pinned.size - have)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
    try:
        with (
            _opened(pinned, have) as (start, chunks),
            partial.open("ab" if start else "wb") as out,
            Progress(*columns, TransferSpeedColumn(), console=Console(stderr=True)) as bar,
        ):
            task = bar.add_task(pinned.filename, total=pinned.size, completed=start)
            for chunk in chunks:
                out.write(chunk)
                bar.advance(task, len(chunk))
    except (OSError, ToolError):
        raise
    except Exception as error:  # every transport has its own errors
        said, at = f"{type(error).__name__}: {error}", _size(partial)
        step = f"{CHECK_NETWORK}, then run the command again: it continues at byte {at}"
        raise ToolError("a download failed", pinned.filename, found=said, next_step=step) from error


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


@contextmanager
def _opened(pinned: PinnedFile, skip: int) -> Iterator[tuple[int, Iterator[bytes]]]:
    """Where the bytes begin, at ``skip`` or at 0 where a server cannot skip, and the bytes."""
    index = Index()
    # The digest decides, so any mirror will do.
    offered = {file.link.filename: file.link for file in index.files(pinned.distribution)}
    link = offered.get(pinned.filename)
    if link is None:
        what = f"the package index does not have the pinned file {pinned.filename}"
        raise ToolError(what, f"distribution {pinned.distribution}", next_step=CHECK_NETWORK)
    headers = {"Accept-Encoding": "identity"}  # half of a compressed answer is useless
    if skip:
        headers["Range"] = f"bytes={skip}-"
    with index.finder.session.get_stream(link.normalized, headers=headers) as response:
        response.raise_for_status()
        partly = response.headers.get("Content-Range", "").startswith(f"bytes {skip}-")
        # Unbuffered: a chunk that is not full yet would be lost with the connection.
        yield skip if partly else 0, response.iter_bytes()
