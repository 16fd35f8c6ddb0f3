# SPDX-License-Identifier: Apache-2.0
"""The rules of the series: one function per rule, which returns what breaks it."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from pathlib import Path

from tools.common.cli import add_series, series_of
from tools.common.errors import LintProblem, Problems
from tools.common.pin import Project
from tools.series.patch import (
    IDENTITY,
    OWN_HEADER,
    STATUSES,
    Patch,
    check_paths,
    parse_status,
    slug,
)
from tools.series.series import Series, read_series

EXAMPLE = ""

# Lenient on purpose: a misspelt header is reported as malformed, not as missing.
_LIKE_STATUS = re.compile(r"\s*upstream[-_ ]*s\w*\s*[:=].*", re.IGNORECASE)
_LIKE_DROP = re.compile(r"\s*drop(?:ped)?[-_ ]*when\s*[:=].*", re.IGNORECASE)
_LIKE_NEEDS = re.compile(r"\s*needs?\s*[:=].*", re.IGNORECASE)
_NEEDS = re.compile(r"Needs: [^,\s]+\.patch(?:, [^,\s]+\.patch)*")
_HEADER = re.compile(
    OWN_HEADER.pattern + r".*|(?:Tests?|Link|Fixes|Bug|Origin|Forwarded|[A-Za-z-]+-by): .*",
    re.IGNORECASE,
)
_REWORD = "reword the commit (in the build tree: git rebase -i refs/re/base), then: series export"


def declare(parser: argparse.ArgumentParser) -> None:
    add_series(parser)


def run(arguments: argparse.Namespace, project: Project) -> None:
    """Check the series and every patch against the rules. Each listed file exists, none is listed
    twice or left out; headers, message body, sign-off, paths and trailing blanks are right; the
    patches that a Needs: header names exist and stand earlier."""
    series = check_series(series_of(arguments, project))
    print(f"series: {len(series)} patches, no problems")


def check_series(series_file: Path) -> Series:
    """Every rule on the list and on each patch, or all breaches in one error."""
    series = read_series(series_file)
    listed = [patch.name for patch in series]
    problems = [
        LintProblem(
            *("a patch is not in the series", series_file, path.name, "every .patch file listed"),
            "add it to the series or delete the file",
        )
        for path in sorted(series_file.parent.glob("*.patch"))
        if path.name not in listed
    ]
    problems += [problem for patch in series for problem in check_patch(patch)]
    if problems := [*problems, *check_needs(series)]:
        raise Problems("the series breaks its rules", problems)
    return series


def check_needs(series: Series) -> list[LintProblem]:
    """Patches that a ``Needs:`` header names and that do not stand earlier in the series."""
    listed = [patch.name for patch in series]
    return [
        LintProblem(
            "a patch needs one that does not stand before it",
            patch.name,
            f"{need}, which {'stands later' if need in listed else 'is not in the series'}",
            "Needs: patches that stand earlier in the series",
            _REWORD,
        )
        for number, patch in enumerate(series)
        for need in patch.needs
        if need not in listed[:number]
    ]


def check_patch(patch: Patch) -> list[LintProblem]:
    """Every rule that the patch breaks by itself."""
    try:
        list(patch.diff)
    except LintProblem as problem:
        return [problem]
    return [*_check_message(patch), *check_paths(patch), *_check_blanks(patch)]


def _check_message(patch: Patch) -> Iterator[LintProblem]:
    lines = patch.body.splitlines()

    def problem(what: str, found: str, expected: str, next_step: str = _REWORD) -> LintProblem:
        return LintProblem(what, patch.name, found, expected, next_step)

    if not slug(patch.subject):
        expected = "Subject: [PATCH] [Area] What it adds"
        yield problem("the patch has no subject", patch.subject or "nothing", expected)

    expected = "Upstream-Status: " + "\n            or: ".join(STATUSES.values())
    found = [line for line in lines if _LIKE_STATUS.fullmatch(line)]
    if not found:
        yield problem("Upstream-Status is missing", "no such line", expected)
    elif len(found) > 1:
        yield problem("Upstream-Status stands more than once", " / ".join(found), expected)
    elif parse_status(found[0]) is None:
        yield problem("Upstream-Status is malformed", found[0], expected)

    found = [line for line in lines if _LIKE_DROP.fullmatch(line)]
    if not any(re.fullmatch(r"Drop-when: \S.*", line) for line in found):
        yield problem(
            "Drop-when is malformed" if found else "Drop-when is missing",
            found[0] if found else "no such line",
            "Drop-when: the condition under which nobody needs the patch",
        )

    for line in lines:
        if _LIKE_NEEDS.fullmatch(line) and not _NEEDS.fullmatch(line):
            yield problem("Needs is malformed", line, "Needs: one.patch, another.patch")

    found = [line for line in lines if re.match(r"\s*signed\W*off\W*by\s*:", line, re.IGNORECASE)]
    if f"Signed-off-by: {IDENTITY}" not in found:
        yield problem(
            "the project's Signed-off-by is missing",
            " / ".join(found) or "no such line",
            f"Signed-off-by: {IDENTITY}",
            "in the build tree: git rebase --signoff refs/re/base, then: series export",
        )

    if not any(line.strip() and not _HEADER.fullmatch(line) for line in lines):
        expected = "why the patch is needed and what a user sees"
        yield problem("the message has no body", "only a subject and headers", expected)


def _check_blanks(patch: Patch) -> list[LintProblem]:
    before = patch.data[: len(patch.data) - len(patch.diff_bytes)].count(b"\n")
    bad = [
        f"{patch.name}:{before + (line.diff_line_no or 0)} ({file.path}:{line.target_line_no})"
        for file in patch.diff
        for hunk in file
        for line in hunk
        if line.is_added and re.search(r"[ \t\r\f\v]+\n?\Z", line.value)
    ]
    expected = "no blank at the end of an added line"
    step = "remove them in the commit, then: series export"
    what = "added lines end in blanks"
    return [LintProblem(what, patch.name, ", ".join(bad), expected, step)] if bad else []
