# SPDX-License-Identifier: Apache-2.0
"""A lock without the digests that nobody installs, and without what another lock holds."""

import argparse
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from unearth import PackageFinder, TargetPython

from tools.common.cli import Parser, ToolError
from tools.common.pin import Project
from tools.source.fetch import Index

_HASH = re.compile(r"--hash=sha256:([0-9a-f]{64})")
_OLD_NAMES = {17: ("manylinux2014",), 12: ("manylinux2010",), 5: ("manylinux1",)}


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
    minor = int(arguments.glibc.split(".")[1])
    finders = [
        Index(TargetPython((3, int(python[2:])), None, "cp", platforms(machine, minor))).finder
        for machine in arguments.machine
        for python in arguments.python
    ]
    included: dict[str, str] = {}
    for name in arguments.include:
        head.append(f"-r {name}")
        included |= read((arguments.out.parent / name).read_text(encoding="utf-8"))[1]
    for name, block in included.items():
        mine, wanted = blocks.pop(name, "nothing").split()[0], block.split()[0]
        if mine != wanted:
            raise ToolError("an included lock has another version", name, wanted, mine)
    with ThreadPoolExecutor(8) as pool:
        made = pool.map(lambda block: trimmed(block, finders), blocks.values())
        text = "\n".join([*head, *made, ""])
    arguments.out.write_text(text, encoding="utf-8")


def read(text: str) -> tuple[list[str], dict[str, str]]:
    """The comment at the top of a lock, and the lines of each package by its name."""
    head, *blocks = re.split(r"^(?=[\w.-]+==)", text, flags=re.MULTILINE)
    comment = [line for line in head.splitlines() if line.startswith("#")]
    return comment, {block.partition("==")[0]: block for block in blocks}


def platforms(machine: str, minor: int) -> list[str]:
    """The tags of every glibc up to 2.``minor``, newest first."""
    names = []
    for number in range(minor, 4, -1):
        names += [f"manylinux_2_{number}", *_OLD_NAMES.get(number, ())]
    return [f"{name}_{machine}" for name in (*names, "linux")]


def trimmed(block: str, finders: Sequence[PackageFinder]) -> str:
    """The lines of one package, with the digest of the wheel that an installer takes for each
    target."""
    name, _, number = block.split()[0].partition("==")
    digests = set()
    for finder in finders:
        best = finder.find_best_match(f"{name}=={number}", allow_yanked=True).best
        if best is None or not best.link.is_wheel:
            what, target = "a locked package has no wheel for a target", finder.target_python
            raise ToolError(what, block.split()[0], f"{target.py_ver}, {target.platforms}")
        digests.add((best.link.hash_option or {}).get("sha256", [""])[0])
    if not digests <= set(_HASH.findall(block)):
        raise ToolError("the index states another digest than the lock", block.split()[0])
    lines = block.splitlines()
    hashes = [f"    --hash=sha256:{digest}" for digest in sorted(digests)]
    notes = [line for line in lines if line.startswith("    #")]
    return "\n".join([" \\\n".join([lines[0].removesuffix(" \\"), *hashes]), *notes])
