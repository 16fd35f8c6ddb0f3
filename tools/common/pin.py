# SPDX-License-Identifier: Apache-2.0
"""``upstream.toml`` as types, and where things stand below the repository root."""

import re
import tomllib
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from tools.common.cli import ToolError

# The line that is meant if none is named; the Makefile reads it here.
DEFAULT_LINE = "v0.33.0"


class PinnedFile(NamedTuple):
    """One download, known by size and digest."""

    distribution: str
    version: str
    filename: str
    size: int
    sha256: str


class BaseWheel(NamedTuple):
    """A published wheel that a patched wheel is laid over.

    ``tests_only``: the wheel is of another version than the release. Its kernels are taken, all
    Python comes from the source. What is built from it is for tests and is never released.
    """

    variant: str
    file: PinnedFile
    tag: str
    local_suffix: str
    trusted_by: str
    tests_only: bool


class Pin(NamedTuple):
    """The release that a series stands on."""

    line: str
    version: str
    tag: str
    commit: str  # the id, or its first digits, or "unknown"
    tree: str
    source: PinnedFile
    archive_only: list[str]
    wheels: dict[str, BaseWheel]


def load_pin(path: Path) -> Pin:
    """Read ``upstream.toml``; an error names the key."""
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        expected = f"one of the lines {', '.join(lines(path.parents[2])) or '(there is none)'}"
        step = "name a line: --on; or git checkout patches"
        raise ToolError("the pin is missing", path, expected, next_step=step) from None

    def take(kind: Any, table: str, values: dict[str, Any]) -> Any:
        """The type, with the values of a table that are its fields."""
        if missing := [name for name in kind._fields if name not in values]:
            raise ToolError(f"the pin has no {table}.{missing[0]}", path)
        return kind(**{name: values[name] for name in kind._fields})

    release, source = data.get("release", {}), data.get("source", {})
    wheels = {}
    for variant, values in data.get("wheel", {}).items():
        if "filename" in values:  # else the release has no such wheel
            name = f"wheel.{variant}"
            file = take(PinnedFile, name, {"version": release.get("version")} | values)
            tests_only = file.version != release.get("version")
            more = {"variant": variant, "file": file, "tests_only": tests_only}
            wheels[variant] = take(BaseWheel, name, values | more)
    more = {
        "line": path.parent.name,
        "source": take(PinnedFile, "source", {"version": release.get("version")} | source),
        "archive_only": source.get("archive_only", []),
        "wheels": wheels,
    }
    return take(Pin, "release", release | more)


def lines(root: Path) -> list[str]:
    """The lines of the repository."""
    return sorted(path.parent.name for path in root.glob("patches/[!.]*/upstream.toml"))


class Project:
    """The repository and one of its lines: where its parts are. ``tree`` is the build tree, if not
    at its own place."""

    def __init__(self, root: Path, line: str = DEFAULT_LINE, tree: Path | None = None) -> None:
        self.root = root
        self.line = line
        self.patches = root / "patches" / line
        self.pin_file = self.patches / "upstream.toml"
        self.series_file = self.patches / "series"
        self.build = root / "build" / line
        self.tree = tree or self.build / "vllm"
        self.wheels = self.build / "wheels"
        self.downloads = root / "build" / "downloads"

    @cached_property
    def pin(self) -> Pin:
        return load_pin(self.pin_file)

    @cached_property
    def release(self) -> int:
        """This project's own release number: ``[project].version`` of ``pyproject.toml``."""
        path = self.root / "pyproject.toml"
        match = re.search(r'^version = "([1-9]\d*)"$', path.read_text(), re.MULTILINE)
        if not match:
            raise ToolError('[project].version is no whole number, as a string: "1"', path)
        return int(match[1])
