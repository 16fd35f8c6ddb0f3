# SPDX-License-Identifier: Apache-2.0
"""vLLM's own tests without and with the series."""

import argparse
from collections import Counter
from collections.abc import Collection, Iterable

from tools.common.cli import ToolError, add_path, table, tell
from tools.common.files import write
from tools.common.pin import Project
from tools.series.series import fingerprint, read_series
from tools.series.tree import BASE_REF
from tools.upstream.check_patches import Checker, open_checker
from tools.upstream.testrun import PASSED, SKIPPED, Outcome, Results, is_test_file

SAME = "same"
BROKEN = "broken"
OTHER = "differs"
ADDED, REMOVED, CHANGED = (f"{what} by the series" for what in ("added", "removed", "changed"))
# Differences that the series' own tests do not account for.
UNEXPLAINED = (BROKEN, OTHER)


def declare(parser: argparse.ArgumentParser) -> None:
    add_path(parser, "--out", "where the table goes, as Markdown")


def run(arguments: argparse.Namespace, project: Project) -> None:
    """Run vLLM's own tests without and with the series, and compare every test. Fails if one
    differs in a file that the series does not touch, or fails as it did not before. Finished files
    are not run again, so an interrupted run can be continued. The wheel of the series must be
    installed: its compiled files serve both."""
    checker = open_checker(project, "upstream-tests")
    git, series = checker.git, read_series(project.series_file)
    touched = set(git.changed(BASE_REF, "HEAD", "--", "tests"))
    listing = project.patches / "upstream-tests"
    text = listing.read_text(encoding="utf-8") if listing.exists() else ""
    listed = [line for line in text.splitlines() if line and not line.startswith("#")]
    files = sorted({*listed, *filter(is_test_file, touched)})
    head = git.text("rev-parse", "HEAD")
    before, after = (run_side(checker, commit, files) for commit in (BASE_REF, head))
    rows, unexplained, total = list[tuple[str, ...]](), list[str](), Counter[str]()
    for file in sorted(before.keys() | after.keys()):
        was, now = before.get(file, {}), after.get(file, {})
        verdicts = {
            test: verdict(was.get(test), now.get(test), file in touched)
            for test in sorted(was.keys() | now.keys())
        }
        found = Counter(verdicts.values())
        total += found
        rows.append(_row(f"`{file.removeprefix('tests/')}`", was.values(), now.values(), found))
        unexplained += [f"{v}: {file} {test}" for test, v in verdicts.items() if v in UNEXPLAINED]
    old, new = (
        {(file, test): outcome for file in side for test, outcome in side[file].items()}
        for side in (before, after)
    )
    rows.append(_row("All", old.values(), new.values(), total))
    if arguments.out:
        about = (
            "# vLLM's own tests without and with the series\n\n"
            f"{total.total()} tests of {len(rows) - 1} files, on the CPU: "
            f"vLLM {project.pin.version} without the series, and with its {len(series)} patches. "
            "No GPU, no network; stand-ins for repositories of the model hub "
            "(`tools/upstream/hubcache.py`). Each tree has its own tests. "
            "`make upstream-tests` writes this file.\n\n"
            f"series: {fingerprint(series, project.pin)[:16]}\n\n"
            "Passed / cannot run here / failed otherwise / skipped.\n"
        )
        lines = [about, *table(("File", "Pristine", "Patched", "Same", "Differences"), rows)]
        write(arguments.out, "\n".join(lines) + "\n")
    print(", ".join(f"{count} {verdict}" for verdict, count in total.most_common()))
    if unexplained:
        what = f"{len(unexplained)} tests differ in a way that the series does not account for"
        step = f"read the output: {checker.results}/*/tests/**/*.log"
        raise ToolError(what, arguments.out, next_step=step, details=unexplained)


def run_side(checker: Checker, commit: str, files: Iterable[str]) -> dict[str, Results]:
    """Run the files that a commit has, less what an earlier run finished."""
    found, there = dict[str, Results](), checker.git.files(commit, "tests")
    for file in (file for file in files if file in there):
        found[file] = checker.run_tests(commit, file)
        tell(f"{commit[:12]}  {file}: {_counts(found[file].values())}")
    return found


def verdict(before: Outcome | None, after: Outcome | None, ours: bool) -> str:
    """The verdict on one test, None where it does not exist; ``ours``: the series touches its
    file."""
    if before and before.is_like(after):
        return SAME
    if after and after.bad and not after.cannot_run:
        return BROKEN
    if ours:
        return ADDED if before is None else REMOVED if after is None else CHANGED
    return BROKEN if before and before.status == PASSED else OTHER


def _row(
    name: str, old: Collection[Outcome], new: Collection[Outcome], found: Counter[str]
) -> tuple[str, ...]:
    how = ", ".join(f"{count} {said}" for said, count in sorted(found.items()) if said != SAME)
    return name, _counts(old), _counts(new), str(found[SAME]), how or "none"


def _counts(outcomes: Collection[Outcome]) -> str:
    kinds = Counter("cannot" if o.cannot_run else "bad" if o.bad else o.status for o in outcomes)
    counts = " / ".join(str(kinds[kind]) for kind in (PASSED, "cannot", "bad", SKIPPED))
    return counts if outcomes else "not there"
