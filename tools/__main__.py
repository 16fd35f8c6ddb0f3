# SPDX-License-Identifier: Apache-2.0
"""The one entry point: ``python -m tools ROOM VERB``. Only here are errors printed."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from tools.commands import release, series, source, upstream, wheel
from tools.errors import ToolError
from tools.pin import Project

_ROOT = Path(__file__).resolve().parent.parent

_EXAMPLES = """\
examples:
  python -m tools source fetch                   get the pinned source of vLLM
  python -m tools series apply                   build/vllm: one commit for each patch
  python -m tools series export                  write those commits back to patches/
  python -m tools series export --check          fail if that would change a file
  python -m tools series check                   check every patch against the rules
  python -m tools series check-patches           check every patch at its own place
  python -m tools series rebase --onto 1.2.3     move the series to another vLLM
  python -m tools series submit                  branches and pull request texts; never pushes
  python -m tools series status                  pin, patches, what is applied, what drifted
  python -m tools series list                    show the series
  python -m tools series fingerprint             one digest for pin and series
  python -m tools wheel build --variant cpu      lay the series over the base wheel
  python -m tools wheel identity --variant cuda  what its version, pin and series are
  python -m tools wheel verify                   prove that a wheel is base plus series
  python -m tools release prepare                number and changelog of the next release
  python -m tools release build                  wheels, checksums, provenance of this commit
  python -m tools upstream test                  vLLM's own tests, with and without the series

Every verb explains itself: python -m tools ROOM VERB --help
"""


def parser() -> argparse.ArgumentParser:
    """All rooms and verbs."""
    top = argparse.ArgumentParser(
        prog="python -m tools",
        description="Source, patches, wheels, releases and upstream tests of vllm-routed-experts.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    top.add_argument(
        "--root", type=Path, default=_ROOT, help="the repository (default: the one of this file)"
    )
    rooms = top.add_subparsers(metavar="ROOM", required=True)
    for room in (source, series, wheel, release, upstream):
        room.add(rooms)
    return top


def _project(parsed: argparse.Namespace) -> Project:
    wheelhouse = getattr(parsed, "wheelhouse", None)
    if wheelhouse is not None and not wheelhouse.is_dir():
        raise ToolError("there is no such wheelhouse", where=wheelhouse, expected="a directory")
    return Project(parsed.root, wheelhouse, getattr(parsed, "offline", False))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one verb; the exit status is 0, 1 for an error that is explained, 2 for wrong usage."""
    parsed = parser().parse_args(arguments)
    try:
        return parsed.verb(parsed, _project(parsed))
    except ToolError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted; nothing was left half done", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
