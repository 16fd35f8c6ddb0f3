# SPDX-License-Identifier: Apache-2.0
"""Pinned files, and what the package index offers."""

import logging
import math
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from packaging.version import Version
from rich.console import Console
from rich.progress import track
from unearth import Link, Package, PackageFinder, TargetPython

from tools.common.cli import ToolError
from tools.common.files import digest_of, replacing
from tools.common.pin import PinnedFile, Project

CHECK_NETWORK = "check the network and PIP_INDEX_URL, or put the file into build/downloads"
_CHUNK = 1 << 20


def check_file(path: Path, pinned: PinnedFile, step: str) -> None:
    """Refuse a file that is not the pinned one; the file is left as it is."""
    expected = f"{pinned.size} bytes, sha256 {pinned.sha256}"
    found = f"{path.stat().st_size} bytes, sha256 {digest_of(path)}"
    if found != expected:
        raise ToolError("a downloaded file is not the pinned one", path, expected, found, step)


def fetch(pinned: PinnedFile, project: Project) -> Path:
    """The pinned file: from build/downloads, or downloaded there now."""
    path = project.downloads / pinned.filename
    if path.exists():
        check_file(path, pinned, f"delete it, then run the command again: rm {path}")
        return path
    with replacing(path) as partial:
        _download(pinned, partial)
        check_file(partial, pinned, "nothing was kept; try another index: PIP_INDEX_URL=...")
    return path


def _download(pinned: PinnedFile, path: Path) -> None:
    """Write what the index has under the name of a pinned file, with a bar on standard error."""
    index = Index()
    # The digest decides, so any mirror will do.
    offered = {file.link.filename: file.link for file in index.files(pinned.distribution)}
    link = offered.get(pinned.filename)
    if link is None:
        what = f"the package index does not have the pinned file {pinned.filename}"
        raise ToolError(what, f"distribution {pinned.distribution}", next_step=CHECK_NETWORK)
    total, console = math.ceil(pinned.size / _CHUNK), Console(stderr=True)
    with index.stream(link, "a download failed") as response, path.open("wb") as out:
        chunks = response.iter_bytes(_CHUNK)
        for chunk in track(chunks, pinned.filename, total=total, console=console):
            out.write(chunk)


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
        with self.stream(file.link, "the package index does not say how large a file is") as answer:
            size = int(answer.headers["content-length"])
        return PinnedFile(file.name, str(file.version), file.link.filename, size, digest)


def releases(files: Sequence[Package]) -> list[Version]:
    """Final releases that are not withdrawn, oldest first."""
    kept = {Version(str(file.version)) for file in files if not file.link.is_yanked}
    return sorted(version for version in kept if not version.is_prerelease)
