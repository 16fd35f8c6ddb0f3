# SPDX-License-Identifier: Apache-2.0
"""``upstream.toml`` as types, and where things stand below the repository root.

A line is one series on one release: a directory of ``patches/`` with the pin (``upstream.toml``),
the patches, and their order (``series``).
"""

import re
import tomllib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from tools.common.errors import ToolError

# The default line. The Makefile has it too.
DEFAULT_LINE = "v0.20.2"
# The commit of a release whose archive does not state it.
UNKNOWN = "unknown"


@dataclass(frozen=True)
class PinnedFile:
    """One download, known by size and digest."""

    distribution: str
    version: str
    filename: str
    size: int
    sha256: str


@dataclass(frozen=True)
class BaseWheel:
    """A published wheel that a patched wheel is laid over.

    ``tests_only``: the wheel is of another version than the release. Its kernels are taken, all
    Python comes from the source. What is built from it is for tests and is never released.
    """

    variant: str
    file: PinnedFile
    tag: str
    local_suffix: str
    trusted_by: str
    tests_only: bool = False


@dataclass(frozen=True)
class Pin:
    """The release that a series stands on."""

    line: str
    version: str
    git_tag: str
    commit: str  # the id, or its first digits, or UNKNOWN
    tree: str
    source: PinnedFile
    archive_only: tuple[str, ...]
    submodule: str | None  # the checkout of the same files, for a line that has one
    wheels: dict[str, BaseWheel]


def load_pin(path: Path) -> Pin:
    """Read ``upstream.toml``; an error names the key."""
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        known = ", ".join(lines(path.parents[2])) or "(there is none)"
        step = "name a line: --on; or git checkout patches"
        what, expected = "the pin is missing", f"one of the lines {known}"
        raise ToolError(what, where=path, expected=expected, next_step=step) from None
    except tomllib.TOMLDecodeError as error:
        raise ToolError("the pin is not valid TOML", where=path, found=error) from error

    def value(dotted: str, pattern: str = r".+", default: Any = None) -> Any:
        at: Any = data
        for key in dotted.split("."):
            at = at.get(key) if isinstance(at, dict) else None
        at = default if at is None else at
        if at is None or (isinstance(at, str) and not re.fullmatch(pattern, at)):
            what = f"the pin has no usable {dotted}"
            raise ToolError(what, where=path, expected=pattern, found=at)
        return at

    release = value("release.version")

    def pinned(table: str) -> PinnedFile:
        return PinnedFile(
            distribution=value(f"{table}.distribution"),
            version=value(f"{table}.version", default=release),
            filename=value(f"{table}.filename", r"[\w.+-]+"),
            size=int(value(f"{table}.size")),
            sha256=value(f"{table}.sha256", r"[0-9a-f]{64}"),
        )

    def base_wheel(variant: str) -> BaseWheel:
        table = f"wheel.{variant}"
        file, tag = pinned(table), value(f"{table}.tag", r"\w+-\w+-[\w.]+")
        suffix = value(f"{table}.local_suffix", r"\w*")
        trusted_by = value(f"{table}.trusted_by")
        return BaseWheel(variant, file, tag, suffix, trusted_by, file.version != release)

    # A variant has no file where the release has no such wheel.
    variants = [name for name, table in data.get("wheel", {}).items() if "filename" in table]
    return Pin(
        line=path.parent.name,
        version=release,
        git_tag=value("release.tag"),
        commit=value("release.commit", rf"[0-9a-f]{{7,40}}|{UNKNOWN}"),
        tree=value("release.tree", r"[0-9a-f]{40}"),
        source=pinned("source"),
        archive_only=tuple(value("source.archive_only")),
        submodule=value("source.submodule", r"[\w.-]*", default="") or None,
        wheels={variant: base_wheel(variant) for variant in variants},
    )


def lines(root: Path) -> list[str]:
    """The lines of the repository."""
    found = sorted(path.parent.name for path in root.glob("patches/*/upstream.toml"))
    return [name for name in found if not name.startswith(".")]


@dataclass(frozen=True)
class Project:
    """The repository and one of its lines: where its parts are, and where pinned files come from.

    ``wheelhouse`` is searched first and never written to. ``offline`` forbids the network.
    """

    root: Path
    line: str = DEFAULT_LINE
    wheelhouse: Path | None = None
    offline: bool = False
    tree_at: Path | None = None  # where the build tree is, if not at its own place

    @cached_property
    def pin(self) -> Pin:
        return load_pin(self.pin_file)

    @property
    def patches(self) -> Path:
        """The line's directory."""
        return self.root / "patches" / self.line

    @property
    def pin_file(self) -> Path:
        return self.patches / "upstream.toml"

    @property
    def series_file(self) -> Path:
        return self.patches / "series"

    @property
    def submodule(self) -> Path | None:
        return self.root / self.pin.submodule if self.pin.submodule else None

    @property
    def build(self) -> Path:
        """Everything made of this line."""
        return self.root / "build" / self.line

    @property
    def tree(self) -> Path:
        return self.tree_at or self.build / "vllm"

    @property
    def wheels(self) -> Path:
        return self.build / "wheels"

    @property
    def downloads(self) -> Path:
        return self.root / "build" / "downloads"

    @cached_property
    def release(self) -> int:
        """This project's own release number: ``[project].version`` of ``pyproject.toml``."""
        path = self.root / "pyproject.toml"
        data = tomllib.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        found = data.get("project", {}).get("version")
        if not isinstance(found, str) or not re.fullmatch(r"[1-9]\d*", found):
            what, expected = "the release number is not usable", 'a whole number, as a string: "1"'
            raise ToolError(what, f"{path}, [project].version", expected, found)
        return int(found)
