# SPDX-License-Identifier: Apache-2.0
"""``patches/<line>/series`` and the files it lists: reading, checking, writing."""

import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path

from tools.common.cli import Problems, ToolError
from tools.common.files import write
from tools.common.pin import Pin
from tools.series.patch import Patch

# Patches in order.
Series = tuple[Patch, ...]


def choose(series: Series, names: Iterable[str]) -> list[Patch]:
    """The named patches in the order of the series; ``.patch`` may be left out of a name."""
    wanted = {f"{name.removesuffix('.patch')}.patch" for name in names}
    if unknown := wanted - {patch.name for patch in series}:
        expected = "one of: " + ", ".join(patch.name for patch in series)
        found = ", ".join(sorted(unknown))
        raise ToolError("the series has no such patch", expected=expected, found=found)
    return [patch for patch in series if patch.name in wanted]


def with_needs(patches: Iterable[Patch], names: Iterable[str]) -> list[str]:
    """The named patches and all that they need, directly or through others, in order."""
    known = {patch.name: patch for patch in patches}
    found, more = set[str](), set(names)
    while more:
        found |= more
        more = {need for name in more for need in known[name].needs} - found
    return [name for name in known if name in found]


def fingerprint(series: Series, pin: Pin) -> str:
    """One sha256 over the pin's source, the order of the series and every byte of it."""
    total = hashlib.sha256(f"source {pin.source.sha256}\n".encode())
    for patch in series:
        total.update(f"{hashlib.sha256(patch.data).hexdigest()}  {patch.name}\n".encode())
    return total.hexdigest()


def read_series(series_file: Path) -> Series:
    """Read the series; refuse a list with mistakes."""
    try:
        names = list(filter(None, series_file.read_text(encoding="utf-8").splitlines()))
    except FileNotFoundError:
        step = "restore it (git checkout patches), or make it: series export"
        raise ToolError("there is no series file", series_file, next_step=step) from None
    problems = []
    for name in dict.fromkeys(names):
        path = series_file.parent / name
        if names.count(name) > 1:
            what, expected, step = "a patch is listed twice", "each name once", "delete all but one"
            problems.append(ToolError(what, series_file, expected, name, step))
        if Path(name).name != name or not name.endswith(".patch"):
            what = "a name in the series is not that of a patch beside it"
            expected, step = "<what-it-adds>.patch", "correct the line"
            problems.append(ToolError(what, series_file, expected, name, step))
        elif not path.is_file():
            what, step = "a listed patch does not exist", "restore the file or delete the line"
            problems.append(ToolError(what, series_file, path, name, step))
    if problems:
        raise Problems(f"the list of patches in {series_file} is wrong", problems=problems)
    return tuple(Patch(name, (series_file.parent / name).read_bytes()) for name in names)


def write_series(series_file: Path, series: Series, removed: Sequence[str]) -> None:
    """Put a new series in the place of the old one. What stops in between can be done again."""
    for patch in series:
        write(series_file.parent / patch.name, patch.data)
    write(series_file, "".join(f"{patch.name}\n" for patch in series))
    for name in removed:
        (series_file.parent / name).unlink()
