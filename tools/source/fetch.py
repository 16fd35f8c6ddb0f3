# SPDX-License-Identifier: Apache-2.0
"""Pinned files, from a wheelhouse or downloaded, and what the package index offers."""

import argparse
import logging
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from packaging.utils import parse_wheel_filename
from packaging.version import Version
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn
from unearth import Link, Package, PackageFinder, TargetPython

from tools.common.cli import ToolError, add_downloads
from tools.common.files import digest_of, replacing
from tools.common.pin import PinnedFile, Project

CHECK_NETWORK = "check the network and PIP_INDEX_URL"
declare = add_downloads


def run(arguments: argparse.Namespace, project: Project) -> None:
    """Get the pinned source archive, and print its name and digest. It is taken from the wheelhouse
    or from build/downloads, where a download goes. PIP_INDEX_URL names another package index."""
    print(f"source: {fetch_source(project)}")


def fetch_source(project: Project) -> str:
    """Get the source; return its name and digest."""
    source = project.pin.source
    fetch(source, project)
    return f"the source archive {source.filename}, sha256 {source.sha256}"


def check_file(path: Path, pinned: PinnedFile, next_step: str | None = None) -> None:
    """Refuse a file that is not the pinned one; the file is left as it is."""
    what = "size"
    expected = f"{pinned.size} bytes"
    found = f"{path.stat().st_size} bytes"
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
    with replacing(target) as partial:
        _download(pinned, partial)
        check_file(partial, pinned, "nothing was kept; try another index: PIP_INDEX_URL=...")
    return target


def _download(pinned: PinnedFile, path: Path) -> None:
    """Write what the index has under the name of a pinned file, with a bar on standard error."""
    index = Index()
    # The digest decides, so any mirror will do.
    offered = {file.link.filename: file.link for file in index.files(pinned.distribution)}
    link = offered.get(pinned.filename)
    if link is None:
        what = f"the package index does not have the pinned file {pinned.filename}"
        raise ToolError(what, f"distribution {pinned.distribution}", next_step=CHECK_NETWORK)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
    with (
        index.stream(link, "a download failed") as response,
        Progress(*columns, TransferSpeedColumn(), console=Console(stderr=True)) as bar,
        path.open("wb") as out,
    ):
        task = bar.add_task(pinned.filename, total=pinned.size)
        for chunk in response.iter_bytes():
            out.write(chunk)
            bar.advance(task, len(chunk))


@contextmanager
def explained(what: str, where: str) -> Iterator[None]:
    """Raise any error of the transport, which has many classes, as a ToolError."""
    try:
        yield
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
        raise ToolError(what, where=where, found=said, next_step=CHECK_NETWORK) from error


class Index:
    """The package index that PIP_INDEX_URL names, or unearth's default one; of all files, or of
    what a target can install."""

    def __init__(self, target: TargetPython | None = None) -> None:
        # Our own message says more about an index that does not answer.
        logging.getLogger("unearth").setLevel(logging.ERROR)
        url = os.environ.get("PIP_INDEX_URL")
        self.finder = PackageFinder(
            index_urls=[url] if url else [],
            target_python=target,
            ignore_compatibility=target is None,
        )

    def files(self, distribution: str) -> list[Package]:
        """Every file of a distribution; an index without it, or without an answer, is an error."""
        where = f"distribution {distribution}"
        with explained("the package index did not answer", where):
            packages = list(self.finder.find_all_packages(distribution, allow_yanked=True))
        if not packages:
            what = "the package index has no such distribution, or did not answer"
            raise ToolError(what, where=where, next_step=CHECK_NETWORK)
        return packages

    @contextmanager
    def stream(self, link: Link, failure: str) -> Iterator[Any]:
        """The index's answer to a request for a file's own bytes; a failure is an error."""
        plain = {"Accept-Encoding": "identity"}
        get = self.finder.session.get_stream
        with explained(failure, link.filename), get(link.normalized, headers=plain) as response:
            response.raise_for_status()
            yield response

    def pin(self, file: Package) -> PinnedFile:
        """The file's size and sha256, as the index states them."""
        digest = (file.link.hash_option or {}).get("sha256", [""])[0]
        if not re.fullmatch(r"[0-9a-f]{64}", digest):
            what = "the package index states no sha256 of a file"
            step = "name another index: PIP_INDEX_URL=..."
            raise ToolError(what, file.link.filename, next_step=step)
        what = "the package index does not say how large a file is"
        with self.stream(file.link, what) as response:
            size = int(response.headers["content-length"])
        return PinnedFile(file.name, str(version_of(file)), file.link.filename, size, digest)


def version_of(file: Package) -> Version:
    """The version in a file's name; unearth leaves out files without one."""
    return Version(str(file.version))


def releases(files: Sequence[Package]) -> list[Version]:
    """Final releases that are not withdrawn, oldest first."""
    kept = {version_of(file) for file in files if not file.link.is_yanked}
    return sorted(version for version in kept if not version.is_prerelease)


def like_wheel(files: Sequence[Package], tag: str) -> Package | None:
    """The wheel for the same interpreter, ABI, kind of system and processor as ``tag``, if any.

    The tags may name other versions of the C library. If there are several builds, the last one is
    taken.
    """

    def kind(tag: object) -> str:
        return re.sub(r"(linux|macosx)_\d+_\d+_", r"\1_", str(tag))

    found = []
    for file in (file for file in files if file.link.is_wheel):
        _, _, build, tags = parse_wheel_filename(file.link.filename)
        if kind(tag) in map(kind, tags):
            found.append((build, tag in map(str, tags), file.link.filename, file))
    return max(found)[-1] if found else None
