# SPDX-License-Identifier: Apache-2.0
"""vLLM's own tests without and with the series."""

import argparse
from collections import Counter
from collections.abc import Collection, Iterable
from typing import NamedTuple

from tools.common.cli import ToolError, add_path, table, tell
from tools.common.files import write
from tools.common.pin import Project
from tools.series.series import fingerprint, read_series
from tools.series.tree import BASE_REF, open_tree
from tools.upstream.check_patches import Checker
from tools.upstream.testrun import PASSED, SKIPPED, Outcome, is_test_file
from tools.wheel.verify import SITE, verify_installed


def declare(parser: argparse.ArgumentParser) -> None:
    text = "only these (default: the line's list, and the series')"
    parser.add_argument("files", nargs="*", metavar="FILE", help=text)
    add_path(parser, "--out", "where the table goes, as Markdown")
    text = "the wheel's package directory (default: this Python's)"
    add_path(parser, "--installed", text)


def run(arguments: argparse.Namespace, project: Project) -> None:
    """Run vLLM's own tests without and with the series, and compare every test. Fails if one
    differs in a file that the series does not touch, or fails as it did not before. Finished files
    are not run again, so an interrupted run can be continued. The wheel of the series must be
    installed: its compiled files serve both."""
    build, installed = project.build / "upstream-tests", arguments.installed or SITE
    verify_installed(project, installed)
    git = open_tree(project)
    touched = set(git.changed(BASE_REF, "HEAD", "--", "tests"))
    listing = project.patches / "upstream-tests"
    text = listing.read_text(encoding="utf-8") if listing.exists() else ""
    listed = [line for line in text.splitlines() if line and not line.startswith("#")]
    files = arguments.files or sorted({*listed, *filter(is_test_file, touched)})
    checker = Checker(git, installed, build)
    head = git.text("rev-parse", "HEAD")
    before, after = (run_side(checker, commit, files) for commit in (BASE_REF, head))
    comparisons = compare(before, after, touched)
    if arguments.out:
        count, series = len({c.file for c in comparisons}), read_series(project.series_file)
        about = (
            f"{len(comparisons)} tests of {count} files, on the CPU: "
            f"vLLM {project.pin.version} without the series, and with its {len(series)} patches. "
            "No GPU, no network; stand-ins for repositories of the model hub "
            "(`tools/upstream/hubcache.py`). Each tree has its own tests. "
            "`make upstream-tests` writes this file.\n\n"
            f"series: {fingerprint(series, project.pin)[:16]}"
        )
        write(arguments.out, render(comparisons, about))
    verdicts = Counter(c.verdict for c in comparisons)
    print(", ".join(f"{count} {verdict}" for verdict, count in verdicts.most_common()))
    if found := [c for c in comparisons if c.verdict in UNEXPLAINED]:
        what = f"{len(found)} tests differ in a way that the series does not account for"
        step = f"read the output: {build}/results/*/tests/**/*.log"
        details = [f"{c.verdict}: {c.file} {c.test}" for c in found]
        raise ToolError(what, arguments.out, next_step=step, details=details)


SAME = "same"
BROKEN = "broken"
OTHER = "differs"
ADDED, REMOVED, CHANGED = (f"{what} by the series" for what in ("added", "removed", "changed"))
# Differences that the series' own tests do not account for.
UNEXPLAINED = (BROKEN, OTHER)


class Comparison(NamedTuple):
    """One test in both trees; None where it does not exist."""

    file: str
    test: str
    pristine: Outcome | None
    patched: Outcome | None
    verdict: str


Side = dict[tuple[str, str], Outcome]  # of one tree: by file and test


def run_side(checker: Checker, commit: str, files: Iterable[str]) -> Side:
    """Run the files that a commit has, less what an earlier run finished."""
    found, there = Side(), checker.git.files(commit, "tests")
    for file in (file for file in files if file in there):
        outcomes = checker.run_tests(commit, file)
        tell(f"{commit[:12]}  {file}: {_counts(outcomes.values())}")
        found |= {(file, test): outcome for test, outcome in outcomes.items()}
    return found


def compare(pristine: Side, patched: Side, touched: Collection[str]) -> list[Comparison]:
    """Every test of both sides, with its verdict; ``touched`` are the files that the series adds,
    changes or removes."""
    found = []
    for file, test in sorted(pristine.keys() | patched.keys()):
        pair = pristine.get((file, test)), patched.get((file, test))
        found.append(Comparison(file, test, *pair, _verdict(*pair, file in touched)))
    return found


def _verdict(before: Outcome | None, after: Outcome | None, ours: bool) -> str:
    """The verdict on one test; ``ours``: the series touches its file."""
    if before and before.is_like(after):
        return SAME
    if after and after.bad and not after.cannot_run:
        return BROKEN
    if ours:
        return ADDED if before is None else REMOVED if after is None else CHANGED
    return BROKEN if before and before.status == PASSED else OTHER


def render(comparisons: list[Comparison], about: str) -> str:
    """The record of a comparison, as Markdown."""
    rows = []
    for file in [*sorted({c.file for c in comparisons}), "All"]:
        ours = [c for c in comparisons if file in (c.file, "All")]
        verdicts = Counter(c.verdict for c in ours)
        same = verdicts.pop(SAME, 0)
        how = ", ".join(f"{count} {verdict}" for verdict, count in sorted(verdicts.items()))
        name = f"`{file.removeprefix('tests/')}`" if file != "All" else file
        sides = (_counts(c.pristine for c in ours), _counts(c.patched for c in ours))
        rows.append((name, *sides, str(same), how or "none"))
    # Cases of a test that differ in one way.
    different: Counter[tuple[str, ...]] = Counter()
    for c in comparisons:
        if c.verdict in UNEXPLAINED:
            name = c.test.removeprefix("tests.").replace("|", "\\|").partition("[")[0]
            different[f"`{name}`", _status(c.pristine), _status(c.patched), c.verdict] += 1
    differ = [(*how, str(count)) for how, count in different.items()]
    titles = ("Test", "Pristine", "Patched", "Verdict", "Cases")
    lines = [
        *("# vLLM's own tests without and with the series", "", about, ""),
        *("Passed / cannot run here / failed otherwise / skipped.", ""),
        *table(("File", "Pristine", "Patched", "Same", "Differences"), rows),
        *("", "## Differences that the series does not make on purpose", ""),
        *(table(titles, differ) if differ else ["None."]),
    ]
    return "\n".join(lines) + "\n"


def _status(outcome: Outcome | None) -> str:
    if outcome is None:
        return "not there"
    return f"{outcome.status}: {_cell(outcome.reason)}" if outcome.bad else outcome.status


def _counts(outcomes: Iterable[Outcome | None]) -> str:
    there = [outcome for outcome in outcomes if outcome is not None]
    if not there:
        return "not there"
    kinds = Counter("cannot" if o.cannot_run else "bad" if o.bad else o.status for o in there)
    return " / ".join(str(kinds[kind]) for kind in (PASSED, "cannot", "bad", SKIPPED))


def _cell(text: str) -> str:
    """Text that breaks no table and is no markup."""
    return f"`{text.replace('|', '¦').replace('`', chr(39))}`" if text else ""
