# SPDX-License-Identifier: Apache-2.0
"""``patches/series`` and the files it lists: reading, checking, writing as one act."""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tools.errors import LintProblem, Problems, ToolError
from tools.patch import Patch, check_patch
from tools.pin import Pin


def parse_series(text: str) -> list[str]:
    """The names in a series file, in order; ``#`` begins a comment.

    >>> parse_series("# base\\none.patch\\n\\n two.patch  # why\\n")
    ['one.patch', 'two.patch']
    """
    names = (line.split("#", 1)[0].strip() for line in text.splitlines())
    return [name for name in names if name]


def render_series(names: Sequence[str], old: str = "") -> str:
    """The text of a series file; comments above a name and after it stay with it.

    >>> render_series(["b.patch", "c.patch"], "# about a\\na.patch\\n# about b\\nb.patch # x\\n")
    '# about b\\nb.patch # x\\nc.patch\\n'
    >>> render_series(["a.patch"], "# at the top\\n\\na.patch\\n# at the end\\n")
    '# at the top\\n\\na.patch\\n# at the end\\n'
    """
    kept: dict[str, list[str]] = {}
    above: list[str] = []
    for line in old.splitlines():
        above.append(line)
        if found := parse_series(line):
            kept[found[0]], above = above, []
    lines = [line for name in names for line in kept.get(name, [name])]
    return "".join(f"{line}\n" for line in [*lines, *above])


@dataclass(frozen=True)
class Series:
    """Patches in order."""

    patches: tuple[Patch, ...] = ()

    def __iter__(self) -> Iterator[Patch]:
        return iter(self.patches)

    def __len__(self) -> int:
        return len(self.patches)

    def before(self, name: str) -> Series:
        """The patches that come before the named one."""
        names = [patch.name for patch in self]
        if name not in names:
            raise ToolError(
                "the series has no such patch",
                found=name,
                expected="one of: " + ", ".join(names),
            )
        return Series(self.patches[: names.index(name)])


def fingerprint(series: Series, pin: Pin) -> str:
    """One sha256 over the pin's source, the order of the series and every byte of it."""
    total = hashlib.sha256(f"source {pin.source.sha256}\n".encode())
    for patch in series:
        total.update(f"{hashlib.sha256(patch.data).hexdigest()}  {patch.name}\n".encode())
    return total.hexdigest()


def _listing_problems(series_file: Path, names: Sequence[str]) -> list[LintProblem]:
    """What is wrong with the list itself, so that it cannot be read as patches."""
    found = []
    for name in dict.fromkeys(names):
        if names.count(name) > 1:
            found.append(
                LintProblem(
                    "a patch is listed twice",
                    where=series_file,
                    found=name,
                    expected="each name once",
                    next_step="delete all lines of it but one",
                )
            )
        if Path(name).name != name or not name.endswith(".patch"):
            found.append(
                LintProblem(
                    "a name in the series is not that of a patch beside it",
                    where=series_file,
                    found=name,
                    expected="<what-it-adds>.patch",
                    next_step="correct the line",
                )
            )
        elif not (series_file.parent / name).is_file():
            found.append(
                LintProblem(
                    "a listed patch does not exist",
                    where=series_file,
                    found=name,
                    expected=series_file.parent / name,
                    next_step="restore the file or delete the line",
                )
            )
    return found


def read_series(series_file: Path) -> Series:
    """The series, read once; a list that names what is not there is refused."""
    try:
        names = parse_series(series_file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        directory = series_file.parent
        aside = sorted(map(str, directory.parent.glob(f".{directory.name}-old-*")))
        raise ToolError(
            "there is no series file",
            where=series_file,
            found=f"an export was cut off; the old series is in {aside[0]}" if aside else None,
            next_step=f"mv {aside[0]} {directory}"
            if aside
            else "restore it (git checkout patches), or make it: series export",
        ) from None
    if problems := _listing_problems(series_file, names):
        raise Problems(f"the list of patches in {series_file} is wrong", problems)
    return Series(tuple(Patch(name, (series_file.parent / name).read_bytes()) for name in names))


def check_series(series_file: Path) -> Series:
    """Every rule on the list and on each patch, or all breaches in one error."""
    series = read_series(series_file)
    listed = {patch.name for patch in series}
    problems: list[LintProblem] = [
        LintProblem(
            "a patch is not in the series",
            where=series_file,
            found=path.name,
            expected="every .patch file listed",
            next_step="add it to the series or delete the file",
        )
        for path in sorted(series_file.parent.glob("*.patch"))
        if path.name not in listed
    ]
    for patch in series:
        problems += check_patch(patch)
    if problems:
        raise Problems("the series breaks its rules", problems)
    return series


def write_series(series_file: Path, series: Series, removed: Sequence[str]) -> None:
    """Put a new series in the place of the old one, completely or not at all.

    The whole directory is written anew beside the old one and takes its name last. An error or a
    crash before that leaves the old series as it was; files that are not patches are carried over.
    """
    directory = series_file.parent
    directory.parent.mkdir(parents=True, exist_ok=True)
    old_text = series_file.read_text(encoding="utf-8") if series_file.exists() else ""
    stage = Path(tempfile.mkdtemp(prefix=f".{directory.name}-new-", dir=directory.parent))
    aside = stage.with_name(stage.name.replace("-new-", "-old-"))
    try:
        if directory.exists():
            shutil.copytree(directory, stage, symlinks=True, dirs_exist_ok=True)
        else:
            stage.chmod(0o755)
        for name in removed:
            (stage / name).unlink(missing_ok=True)
        for patch in series:
            _write(stage / patch.name, patch.data)
        names = [patch.name for patch in series]
        _write(stage / series_file.name, render_series(names, old_text).encode())
        if directory.exists():
            directory.rename(aside)
        try:
            stage.rename(directory)
        except BaseException:
            if aside.exists():
                aside.rename(directory)
            raise
    finally:
        shutil.rmtree(stage, ignore_errors=True)
    shutil.rmtree(aside, ignore_errors=True)


def _write(path: Path, data: bytes) -> None:
    if path.exists() and path.read_bytes() == data:
        return
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
