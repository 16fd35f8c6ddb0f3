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
# The commit of a release whose archive does not state it.
UNKNOWN = "unknown"


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
    git_tag: str
    commit: str  # the id, or its first digits, or UNKNOWN
    tree: str
    source: PinnedFile
    archive_only: tuple[str, ...]
    submodule: str | None  # where a person can have the history, for a line that has one
    wheels: dict[str, BaseWheel]


def load_pin(path: Path) -> Pin:
    """Read ``upstream.toml``; an error names the key."""
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        expected = f"one of the lines {', '.join(lines(path.parents[2])) or '(there is none)'}"
        step = "name a line: --on; or git checkout patches"
        raise ToolError("the pin is missing", path, expected, next_step=step) from None
    except tomllib.TOMLDecodeError as error:
        raise ToolError("the pin is not valid TOML", where=path, found=error) from error

    def value(dotted: str, pattern: str = r".+", default: Any = None) -> Any:
        at: Any = data
        for key in dotted.split("."):
            at = at.get(key) if isinstance(at, dict) else None
        at = default if at is None else at
        if at is None or (isinstance(at, str) and not re.fullmatch(pattern, at)):
            raise ToolError(f"the pin has no usable {dotted}", path, pattern, at)
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

    wheels = {}
    for variant in data.get("wheel", {}):
        table = f"wheel.{variant}"
        if "filename" not in data["wheel"][variant]:  # the release has no such wheel
            continue
        file, tag = pinned(table), value(f"{table}.tag", r"\w+-\w+-[\w.]+")
        suffix, trusted_by = value(f"{table}.local_suffix", r"\w*"), value(f"{table}.trusted_by")
        tests_only = file.version != release
        wheels[variant] = BaseWheel(variant, file, tag, suffix, trusted_by, tests_only)
    return Pin(
        line=path.parent.name,
        version=release,
        git_tag=value("release.tag"),
        commit=value("release.commit", rf"[0-9a-f]{{7,40}}|{UNKNOWN}"),
        tree=value("release.tree", r"[0-9a-f]{40}"),
        source=pinned("source"),
        archive_only=tuple(value("source.archive_only")),
        submodule=value("source.submodule", r"[\w.-]*", default="") or None,
        wheels=wheels,
    )


def lines(root: Path) -> list[str]:
    """The lines of the repository."""
    return sorted(path.parent.name for path in root.glob("patches/[!.]*/upstream.toml"))


class Project:
    """The repository and one of its lines: where its parts are, and where pinned files come from.

    ``wheelhouse`` is searched first and never written to. ``offline`` forbids the network. ``tree``
    is the build tree, if not at its own place.
    """

    def __init__(
        self,
        root: Path,
        line: str = DEFAULT_LINE,
        wheelhouse: Path | None = None,
        offline: bool = False,
        tree: Path | None = None,
    ) -> None:
        self.root = root
        self.line = line
        self.wheelhouse = wheelhouse
        self.offline = offline
        self.patches = root / "patches" / line
        self.pin_file = self.patches / "upstream.toml"
        self.series_file = self.patches / "series"
        self.build = root / "build" / line
        self.tree = tree or self.build / "vllm"
        self.wheels = self.build / "wheels"
        self.downloads = root / "build" / "downloads"

    def with_tree(self, tree: Path) -> "Project":
        return Project(self.root, self.line, self.wheelhouse, self.offline, tree)

    @cached_property
    def pin(self) -> Pin:
        return load_pin(self.pin_file)

    @cached_property
    def release(self) -> int:
        """This project's own release number: ``[project].version`` of ``pyproject.toml``."""
        path = self.root / "pyproject.toml"
        data = tomllib.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        found = data.get("project", {}).get("version")
        if not isinstance(found, str) or not re.fullmatch(r"[1-9]\d*", found):
            what = '[project].version is no whole number, as a string: "1"'
            raise ToolError(what, path, found=found)
        return int(found)
