# SPDX-License-Identifier: Apache-2.0
"""vLLM's own tests on both wheels."""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from pathlib import Path

from tools.common.cli import add_series, add_tree, series_of, tell, tree_of
from tools.common.errors import ToolError
from tools.common.pin import Project
from tools.series.series import parse_series
from tools.series.tree import open_tree
from tools.upstream.compare import (
    UNEXPLAINED,
    Side,
    compare,
    render,
    run_side,
    touched_tests,
)
from tools.upstream.testrun import Results, is_test_file
from tools.wheel.verify import verify_installed

EXAMPLE = "--out benchmarks/results/upstream-tests.md"


def declare(parser: argparse.ArgumentParser) -> None:
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


def run(arguments: argparse.Namespace, project: Project) -> None:
    """Run vLLM's own tests on both wheels and compare every test. Fails if one differs that the
    series does not touch, or if one that it touches fails. Finished files are not run again, so an
    interrupted run can be continued. The patched wheel must be installed, and the pristine one in
    build/<line>/pristine/site (make upstream-tests)."""
    tree, series_file = tree_of(arguments, project), series_of(arguments, project)
    pristine = project.build / "pristine"
    installed = arguments.installed or Path(sys.executable)
    patched = verify_installed(project, installed, tree, series_file)
    verify_installed(project, pristine / "site", pristine / "vllm", series_file)
    git = open_tree(tree, project.pin)
    touched = touched_tests(git)
    listing = project.patches / "upstream-tests"
    listed = parse_series(listing.read_text(encoding="utf-8")) if listing.exists() else []
    files = arguments.files or sorted({*listed, *filter(is_test_file, touched)})
    build = project.build / "upstream-tests"
    start = time.monotonic()

    def told(side: str, file: str, results: Results) -> None:
        counts = Counter("failed" if o.bad else o.status for o in results.values())
        said = ", ".join(f"{count} {status}" for status, count in sorted(counts.items()))
        tell(f"{time.monotonic() - start:5.0f} s  {side:8}  {file}: {said}")

    sides = (
        Side("pristine", open_tree(pristine / "vllm", project.pin), pristine / "site"),
        Side("patched", git, arguments.installed),
    )
    before, after = (run_side(side, files, build, told) for side in sides)
    comparisons = compare(before, after, touched)
    if arguments.out:
        about = (
            f"{len(comparisons)} tests of {len({c.file for c in comparisons})} files, on the CPU "
            f"wheels of vLLM {project.pin.version}: without the series, and with its "
            f"{patched.patches} patches. No GPU, no network; stand-ins for repositories of the "
            "model hub (`tools/upstream/hubcache.py`). Each wheel is tested with its own tree's "
            "tests. `make upstream-tests` writes this file."
        )
        arguments.out.write_text(render(comparisons, about), encoding="utf-8")
    verdicts = Counter(c.verdict for c in comparisons)
    print(", ".join(f"{count} {verdict}" for verdict, count in verdicts.most_common()))
    if found := [c for c in comparisons if c.verdict in UNEXPLAINED]:
        raise ToolError(
            f"{len(found)} tests differ in a way that the series does not account for",
            where=arguments.out,
            expected="the same result on both wheels, or a test that the series touches and that "
            "passes",
            next_step=f"read the output: {build}/results/*/tests/**/*.log",
            details=[f"{c.verdict}: {c.file} {c.test}" for c in found],
        )
