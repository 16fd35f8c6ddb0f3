# SPDX-License-Identifier: Apache-2.0
"""``patches/<line>/series`` and the files it lists: reading, checking, writing as one act."""

import hashlib
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tools.common.errors import Problems, ToolError
from tools.common.files import staging, write
from tools.common.pin import Pin, left_aside
from tools.series.patch import Patch

# Patches in order.
Series = tuple[Patch, ...]


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


def before(series: Series, name: str) -> Series:
    """The patches that come before the named one."""
    names = [patch.name for patch in series]
    if name not in names:
        expected = "one of: " + ", ".join(names)
        raise ToolError("the series has no such patch", found=name, expected=expected)
    return series[: names.index(name)]


def with_needs(patches: Iterable[Patch], names: Iterable[str]) -> list[str]:
    """The named patches, those that they need and those that these need, in order."""
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


def _listing_problems(series_file: Path, names: Sequence[str]) -> Iterator[ToolError]:
    """Mistakes in the list that keep the patches from being read."""
    for name in dict.fromkeys(names):
        path = series_file.parent / name
        if names.count(name) > 1:
            what, step = "a patch is listed twice", "delete all but one line"
            yield ToolError(what, series_file, "each name once", name, step)
        if Path(name).name != name or not name.endswith(".patch"):
            what = "a name in the series is not that of a patch beside it"
            yield ToolError(what, series_file, "<what-it-adds>.patch", name, "correct the line")
        elif not path.is_file():
            what, step = "a listed patch does not exist", "restore the file or delete the line"
            yield ToolError(what, series_file, path, name, step)


def read_series(series_file: Path) -> Series:
    """Read the series; refuse a list with mistakes."""
    try:
        names = parse_series(series_file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        step = "restore it (git checkout patches), or make it: series export"
        raise ToolError(
            "there is no series file",
            where=series_file,
            next_step=left_aside(series_file.parent) or step,
        ) from None
    if problems := list(_listing_problems(series_file, names)):
        raise Problems(f"the list of patches in {series_file} is wrong", problems)
    return tuple(Patch(name, (series_file.parent / name).read_bytes()) for name in names)


@contextmanager
def replacing_line(directory: Path) -> Iterator[Path]:
    """An empty directory that takes the place of a line's directory when the body succeeds.

    An error or a crash before that leaves the old directory as it was. A crash between the two
    renames leaves it beside its place; ``left_aside`` names the way back.
    """
    with staging(directory) as stage:
        aside = stage.with_name(stage.name.replace(directory.name, f"{directory.name}-old"))
        yield stage
        if directory.exists():
            directory.rename(aside)
        try:
            stage.rename(directory)
        except BaseException:
            if aside.exists():
                aside.rename(directory)
            raise
    shutil.rmtree(aside, ignore_errors=True)


def write_series(series_file: Path, series: Series, removed: Sequence[str]) -> None:
    """Put a new series in the place of the old one, completely or not at all.

    Files that are not patches are carried over.
    """
    old_text = series_file.read_text(encoding="utf-8") if series_file.exists() else ""
    text = render_series([patch.name for patch in series], old_text).encode()
    with replacing_line(series_file.parent) as stage:
        if series_file.parent.exists():
            shutil.copytree(series_file.parent, stage, symlinks=True, dirs_exist_ok=True)
        for name in removed:
            (stage / name).unlink(missing_ok=True)
        files = {patch.name: patch.data for patch in series} | {series_file.name: text}
        for path, data in ((stage / name, data) for name, data in files.items()):
            if not path.exists() or path.read_bytes() != data:
                write(path, data)
