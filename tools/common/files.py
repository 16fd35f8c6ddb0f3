# SPDX-License-Identifier: Apache-2.0
"""Files and directories that are written completely or not at all."""

import hashlib
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def staging(target: Path) -> Iterator[Path]:
    """An empty directory beside ``target``; removed at the end unless the body renames it."""
    target.parent.mkdir(parents=True, exist_ok=True)
    beside, prefix = target.parent.resolve(), f".{target.name}-"
    with tempfile.TemporaryDirectory("", prefix, beside, ignore_cleanup_errors=True) as name:
        Path(name).chmod(0o755)
        yield Path(name)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Where to write a new file, which takes the place of ``path`` when the body succeeds."""
    with staging(path) as place:
        yield place / path.name
        (place / path.name).replace(path)


def write(path: Path, data: bytes | str) -> None:
    """Replace a file in one act, or leave it as it was. Makes its directory."""
    with replacing(path) as new:
        new.write_bytes(data.encode() if isinstance(data, str) else data)


def digest_of(path: Path) -> str:
    """The sha256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
