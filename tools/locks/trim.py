# SPDX-License-Identifier: Apache-2.0
"""A lock without the digests that nobody installs, and without what another lock holds."""

import argparse
import re
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from packaging.tags import Tag, compatible_tags, cpython_tags
from packaging.utils import parse_wheel_filename
from packaging.version import Version
from unearth import Package

from tools.common.cli import Parser, ToolError
from tools.common.pin import Project
from tools.source.index import Index, version_of

_HASH = re.compile(r"--hash=sha256:([0-9a-f]{64})")
_HEAD = re.compile(r"([\w.-]+)==(\S+)")
_OLD_NAMES = {17: "manylinux2014", 12: "manylinux2010", 5: "manylinux1"}


def declare(parser: Parser) -> None:
    parser.add_argument("lock", type=Path, help="the lock that `uv pip compile` wrote")
    parser.add_argument("--out", type=Path, required=True, help="where the shorter lock goes")
    parser.add_argument("--python", action="append", required=True, help="as 3.11; repeatable")
    parser.add_argument("--machine", action="append", required=True, help="repeatable")
    parser.add_argument("--glibc", required=True, help="the oldest that must do, as 2.28")
    text = "a lock beside OUT: include it, and leave out what it holds; repeatable"
    parser.add_argument("--include", action="append", default=[], help=text)


def run(arguments: argparse.Namespace, project: Project) -> None:
    """Leave in a lock the digests of the wheels that an installer takes, one for each Python and
    machine. The package index says which digest belongs to which wheel."""
    head, blocks = read(arguments.lock.read_text(encoding="utf-8"))
    targets = [
        target_tags(python, machine, arguments.glibc)
        for machine in arguments.machine
        for python in arguments.python
    ]
    included: dict[str, str] = {}
    for name in arguments.include:
        head.append(f"-r {name}")
        included |= read((arguments.out.parent / name).read_text(encoding="utf-8"))[1]
    for name, block in included.items():
        mine = blocks.pop(name, None)
        if mine is None or version(mine) != version(block):
            found = version(mine) if mine else "nothing"
            raise ToolError("an included lock has another version", name, version(block), found)
    index = Index()
    with ThreadPoolExecutor(8) as pool:
        files = dict(zip(blocks, pool.map(index.files, blocks), strict=True))
    lines = [line for name in blocks for line in trimmed(blocks[name], files[name], targets)]
    arguments.out.write_text("\n".join([*head, *lines, ""]), encoding="utf-8")


def read(text: str) -> tuple[list[str], dict[str, str]]:
    """The comment at the top of a lock, and the lines of each package by its name."""
    head: list[str] = []
    blocks: dict[str, str] = {}
    for line in text.splitlines():
        if match := _HEAD.match(line):
            blocks[name := match[1]] = line
        elif blocks:
            blocks[name] += f"\n{line}"
        elif line.startswith("#"):
            head.append(line)
    return head, blocks


def version(block: str) -> str:
    match = _HEAD.match(block)
    assert match
    return match[2]


def target_tags(python: str, machine: str, glibc: str) -> dict[Tag, int]:
    """Every tag that the target can install, best first, with its place."""
    numbers = [int(part) for part in python.split(".")]
    platforms = list(_platforms(machine, int(glibc.split(".")[1])))
    tags = [
        *cpython_tags(numbers, platforms=platforms),
        *compatible_tags(numbers, f"cp{numbers[0]}{numbers[1]}", platforms),
    ]
    return {tag: place for place, tag in reversed(list(enumerate(tags)))}


def _platforms(machine: str, minor: int) -> Iterator[str]:
    for number in range(minor, 4, -1):
        yield f"manylinux_2_{number}_{machine}"
        if number in _OLD_NAMES:
            yield f"{_OLD_NAMES[number]}_{machine}"
    yield f"linux_{machine}"


def trimmed(block: str, files: Sequence[Package], targets: Sequence[dict[Tag, int]]) -> list[str]:
    """The lines of one package, with one digest for each target."""
    wanted = Version(version(block))
    wheels = [file for file in files if file.link.is_wheel and version_of(file) == wanted]
    known = set(_HASH.findall(block))
    digests = {best(block, wheels, target) for target in targets}
    if not digests <= known:
        raise ToolError("the index states another digest than the lock", block.split()[0])
    lines = block.splitlines()
    hashes = [f"    --hash=sha256:{digest}" for digest in sorted(digests)]
    notes = [line for line in lines if line.startswith("    #")]
    return [" \\\n".join([lines[0].removesuffix(" \\"), *hashes]), *notes]


def best(block: str, wheels: Sequence[Package], target: dict[Tag, int]) -> str:
    """The digest of the wheel that an installer takes for a target."""
    found = []
    for file in wheels:
        _, _, build, tags = parse_wheel_filename(file.link.filename)
        if places := [target[tag] for tag in tags if tag in target]:
            found.append((min(places), [-(build or (0, ""))[0]], file))
    if not found:
        what = "a locked package has no wheel for a target"
        raise ToolError(what, block.split()[0], expected=str(next(iter(target))))
    link = min(found, key=lambda one: one[:2])[2].link
    return (link.hash_option or {}).get("sha256", [""])[0]
