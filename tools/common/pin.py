# SPDX-License-Identifier: Apache-2.0
"""``upstream.toml`` as types, and where things stand below the repository root."""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from tools.common.errors import ToolError

# The commit of a release of which only the archive is known, which does not state it.
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
    """A published wheel that a patched wheel is laid over."""

    variant: str
    file: PinnedFile
    tag: str
    local_suffix: str
    trusted_by: str


@dataclass(frozen=True)
class Pin:
    """The release that the series stands on."""

    version: str
    git_tag: str
    commit: str
    tree: str
    source: PinnedFile
    archive_only: tuple[str, ...]
    wheels: dict[str, BaseWheel]


def load_pin(path: Path) -> Pin:
    """Read ``upstream.toml``; an error names the key."""
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ToolError(
            "the pin is missing", where=path, next_step="restore it: git checkout upstream.toml"
        ) from None
    except tomllib.TOMLDecodeError as error:
        raise ToolError("the pin is not valid TOML", where=path, found=error) from error

    def value(dotted: str, pattern: str = r".+") -> Any:
        at: Any = data
        for key in dotted.split("."):
            at = at.get(key) if isinstance(at, dict) else None
        if at is None or (isinstance(at, str) and not re.fullmatch(pattern, at)):
            raise ToolError(
                f"the pin has no usable {dotted}", where=path, expected=pattern, found=at
            )
        return at

    version = value("release.version")

    def pinned(table: str) -> PinnedFile:
        name = value(f"{table}.filename", r"[\w.+-]+")
        size, digest = int(value(f"{table}.size")), value(f"{table}.sha256", r"[0-9a-f]{64}")
        return PinnedFile(value(f"{table}.distribution"), version, name, size, digest)

    def base_wheel(variant: str) -> BaseWheel:
        table = f"wheel.{variant}"
        tag = value(f"{table}.tag", r"\w+-\w+-[\w.]+")
        suffix = value(f"{table}.local_suffix", r"\w*")
        return BaseWheel(variant, pinned(table), tag, suffix, value(f"{table}.trusted_by"))

    return Pin(
        version=version,
        git_tag=value("release.tag"),
        commit=value("release.commit", rf"[0-9a-f]{{40}}|{UNKNOWN}"),
        tree=value("release.tree", r"[0-9a-f]{40}"),
        source=pinned("source"),
        archive_only=tuple(value("source.archive_only")),
        wheels={
            variant: base_wheel(variant)
            for variant, table in data.get("wheel", {}).items()
            if "filename" in table  # absent where the release has no such wheel
        },
    )


@dataclass(frozen=True)
class Project:
    """The repository: where its parts are, and where pinned files come from.

    ``wheelhouse`` is searched first and never written to. ``offline`` forbids the network.
    """

    root: Path
    wheelhouse: Path | None = None
    offline: bool = False

    @cached_property
    def pin(self) -> Pin:
        return load_pin(self.root / "upstream.toml")

    @property
    def submodule(self) -> Path:
        return self.root / "vllm"

    @property
    def series_file(self) -> Path:
        return self.root / "patches" / "series"

    @property
    def tree(self) -> Path:
        return self.root / "build" / "vllm"

    @property
    def downloads(self) -> Path:
        return self.root / "build" / "downloads"

    @property
    def wheels(self) -> Path:
        return self.root / "build" / "wheels"

    @cached_property
    def release(self) -> int:
        """This project's own release number: ``[project].version`` of ``pyproject.toml``."""
        path = self.root / "pyproject.toml"
        data = tomllib.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        found = data.get("project", {}).get("version")
        if not isinstance(found, str) or not re.fullmatch(r"[1-9]\d*", found):
            raise ToolError(
                "the release number is not usable",
                where=f"{path}, [project].version",
                expected='a whole number from 1 on, as a string: "1"',
                found=found,
                next_step="correct it, or name one: wheel build --release N",
            )
        return int(found)
