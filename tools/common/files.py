# SPDX-License-Identifier: Apache-2.0
"""Files and directories that are written completely or not at all."""

import hashlib
import os
import tempfile
from collections.abc import Iterator
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
