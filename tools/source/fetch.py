# SPDX-License-Identifier: Apache-2.0
"""Pinned files, from a wheelhouse or downloaded."""

import argparse
from pathlib import Path
from typing import IO

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from tools.common.cli import ToolError, add_downloads
from tools.common.files import digest_of, replacing
from tools.common.pin import PinnedFile, Project
from tools.source.index import CHECK_NETWORK, Index, explained

declare = add_downloads


def run(arguments: argparse.Namespace, project: Project) -> None:
    """Get the pinned source archive, and print its name and digest. It is taken from the wheelhouse
    or from build/downloads, where a download goes. PIP_INDEX_URL names another package index."""
    print(f"source: {fetch_source(project)}")


def fetch_source(project: Project) -> str:
    """Get the source; return which it is."""
    source = project.pin.source
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
    with replacing(target) as partial:
        _download(pinned, partial)
        partial.flush()
        step = "nothing was kept; try another index: PIP_INDEX_URL=..."
        check_file(Path(partial.name), pinned, step)
    return target


def _download(pinned: PinnedFile, out: IO[bytes]) -> None:
    """Write what the index has under the name of a pinned file, with a bar on standard error."""
    index = Index()
    # The digest decides, so any mirror will do.
    offered = {file.link.filename: file.link for file in index.files(pinned.distribution)}
    link = offered.get(pinned.filename)
    if link is None:
        what = f"the package index does not have the pinned file {pinned.filename}"
        raise ToolError(what, f"distribution {pinned.distribution}", next_step=CHECK_NETWORK)
    plain = {"Accept-Encoding": "identity"}  # the file's own bytes
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
    with (
        explained("a download failed", pinned.filename),
        index.finder.session.get_stream(link.normalized, headers=plain) as response,
        Progress(*columns, TransferSpeedColumn(), console=Console(stderr=True)) as bar,
    ):
        response.raise_for_status()
        task = bar.add_task(pinned.filename, total=pinned.size)
        for chunk in response.iter_bytes():
            out.write(chunk)
            bar.advance(task, len(chunk))
