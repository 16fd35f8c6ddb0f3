# SPDX-License-Identifier: Apache-2.0
"""What the package index offers of a distribution: versions, files, digests and sizes."""

import logging
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from packaging.utils import parse_wheel_filename
from packaging.version import Version
from unearth import Package, PackageFinder, TargetPython

from tools.common.cli import ToolError
from tools.common.pin import PinnedFile

CHECK_NETWORK = "check the network and PIP_INDEX_URL"


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

    def pin(self, file: Package) -> PinnedFile:
        """The file's size and sha256, as the index states them."""
        digest = (file.link.hash_option or {}).get("sha256", [""])[0]
        if not re.fullmatch(r"[0-9a-f]{64}", digest):
            what, step = "the package index states no sha256 of a file", "name another index"
            raise ToolError(what, file.link.filename, next_step=f"{step}: PIP_INDEX_URL=...")
        with explained("the package index does not say how large a file is", file.link.filename):
            if file.link.is_file:
                size = file.link.file_path.stat().st_size
            else:
                response = self.finder.session.head(file.link.url_without_fragment)
                response.raise_for_status()
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
