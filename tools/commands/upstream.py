# SPDX-License-Identifier: Apache-2.0
"""The room of vLLM's own tests."""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from pathlib import Path

from tools.commands.common import Room, add_series, add_tree
from tools.errors import ToolError
from tools.pin import Project
from tools.testrun import Results
from tools.tree import open_tree
from tools.upstream_tests import (
    FILES,
    Side,
    compare,
    is_test_file,
    render,
    run_side,
    touched_tests,
    unexplained,
)
from tools.verify import verify_installed


def add(parent: argparse._SubParsersAction) -> None:
    room = Room(parent, "upstream", "vLLM's own tests, on the pristine and on the patched wheel")
    parser = room.verb("test", test, "--out benchmarks/results/upstream-tests.md")
    parser.add_argument(
        "files", nargs="*", metavar="FILE", help="only these (default: the list, and the series')"
    )
    parser.add_argument("--out", type=Path, help="where the table goes, as Markdown")
    parser.add_argument(
        "--installed",
        type=Path,
        metavar="SITE",
        help="the patched wheel's package directory (default: this Python's)",
    )
    add_tree(parser)
    add_series(parser)


def test(arguments: argparse.Namespace, project: Project) -> int:
    """Run vLLM's own tests on both wheels and compare every test. Fails if one differs that the
    series does not touch, or if one that it touches fails. What was run is not run again, so an
    interrupted run goes on. Wants the patched wheel installed, and the pristine one in
    build/pristine/site (make upstream-tests)."""
    tree = arguments.tree or project.tree
    series_file = arguments.series or project.series_file
    pristine_tree = project.root / "build" / "pristine" / "vllm"
    pristine_site = project.root / "build" / "pristine" / "site"
    patched = verify_installed(
        project, arguments.installed or Path(sys.executable), tree, series_file
    )
    verify_installed(project, pristine_site, pristine_tree, series_file)
    git = open_tree(tree, project.pin)
    touched = touched_tests(git)
    files = arguments.files or sorted({*FILES, *filter(is_test_file, touched)})
    build = project.root / "build" / "upstream-tests"
    start = time.monotonic()

    def told(side: str, file: str, results: Results) -> None:
        counts = Counter("failed" if o.bad else o.status for o in results.values())
        said = ", ".join(f"{count} {status}" for status, count in sorted(counts.items()))
        seconds = time.monotonic() - start
        print(f"{seconds:5.0f} s  {side:8}  {file}: {said}", file=sys.stderr)

    sides = (
        Side("pristine", open_tree(pristine_tree, project.pin), pristine_site),
        Side("patched", git, arguments.installed),
    )
    before, after = (run_side(side, files, build, told) for side in sides)
    comparisons = compare(before, after, touched)
    num_files = len({c.file for c in comparisons})
    about = [
        f"{len(comparisons)} tests of {num_files} files, on the CPU wheels of vLLM "
        f"{project.pin.version}: without the series, and with its {patched.patches} patches. No "
        "GPU, no network; stand-ins for repositories of the model hub (`tools/hubcache.py`). Each "
        "wheel is tested with its own tree's tests. `make upstream-tests` writes this file.",
    ]
    text = render(comparisons, about)
    if arguments.out:
        arguments.out.write_text(text, encoding="utf-8")
    verdicts = Counter(c.verdict for c in comparisons)
    print(", ".join(f"{count} {verdict}" for verdict, count in verdicts.most_common()))
    if found := unexplained(comparisons):
        raise ToolError(
            f"{len(found)} tests differ in a way that the series does not account for",
            where=arguments.out,
            expected="the same result on both wheels, or a test that the series touches and that "
            "passes",
            next_step=f"read the output: {build}/results/*/tests/**/*.log",
            details=[f"{c.verdict}: {c.file} {c.test}" for c in found],
        )
    return 0
