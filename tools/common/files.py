# SPDX-License-Identifier: Apache-2.0
"""Files and directories that are written completely or not at all."""

import hashlib
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO


@contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """A new file beside ``path`` that takes its name when the body succeeds."""
    beside, prefix = path.parent, f".{path.name}."
    with tempfile.NamedTemporaryFile(dir=beside, prefix=prefix, delete=False) as file:
        partial = Path(file.name)
        try:
            yield file
            file.flush()
            os.fsync(file.fileno())
            partial.chmod(0o644)
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)


def write(path: Path, data: bytes | str) -> None:
    """Replace a file in one act, or leave it as it was. Makes its directory."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as file:
        file.write(data.encode() if isinstance(data, str) else data)


def replace_all(
    files: Mapping[Path, bytes | None], then: Callable[[], object] = lambda: None
) -> None:
    """Write several files, or remove those with None; then call ``then``.

    An error leaves all files as they were. Files that are as they should be are not touched.
    """
    old = {path: path.read_bytes() if path.exists() else None for path in files}
    try:
        for path, data in files.items():
            _put(path, data)
        then()
    except BaseException:
        for path, data in old.items():
            _put(path, data)
        raise


def _put(path: Path, data: bytes | None) -> None:
    if data is None:
        path.unlink(missing_ok=True)
    elif not path.exists() or path.read_bytes() != data:
        write(path, data)


@contextmanager
def staging(target: Path) -> Iterator[Path]:
    """An empty directory beside ``target``; removed at the end unless the body renames it."""
    target.parent.mkdir(parents=True, exist_ok=True)
    beside, prefix = target.parent.resolve(), f".{target.name}-"
    with tempfile.TemporaryDirectory("", prefix, beside, ignore_cleanup_errors=True) as name:
        Path(name).chmod(0o755)
        yield Path(name)


def digest_of(path: Path) -> str:
    """The sha256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
