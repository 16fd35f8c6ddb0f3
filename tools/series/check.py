# SPDX-License-Identifier: Apache-2.0
"""The rules of the series: what breaks them, and what to do."""

import argparse
import re
from collections.abc import Iterator

from tools.common.cli import Problems, ToolError
from tools.common.pin import Project
from tools.series.series import HEADERS, IDENTITY, OWN_HEADER, Patch, Series, read_series, slug

_HEADER = re.compile(
    OWN_HEADER.pattern + r".*|(?:Tests?|Link|Fixes|Bug|Origin|Forwarded|[A-Za-z-]+-by): .*",
    re.IGNORECASE,
)
_BAD_LINE = re.compile(r"[ \t\r\f\v]+\n?\Z|\A(<{7}|>{7}|\|{7}) ")
_REWORD = "reword the commit (in the build tree: git rebase -i refs/re/base), then: series export"
_SIGN = "in the build tree: git rebase --signoff refs/re/base, then: series export"


def run(arguments: argparse.Namespace, project: Project) -> None:
    """Check the series and every patch against the rules. Each listed file exists. No file is
    listed twice or left out. Headers, message body, sign-off, files and trailing blanks are right.
    Each patch that a Needs: header names exists and stands earlier."""
    print(f"series: {len(check_series(project))} patches, no problems")


def check_series(project: Project) -> Series:
    """Every rule on the list and on each patch, or all breaches in one error."""
    file = project.series_file
    series = read_series(file)
    unlisted = {path.name for path in file.parent.glob("*.patch")} - {p.name for p in series}
    what = "a patch is not in the series"
    step = "add it to the series or delete the file"
    problems = [ToolError(what, file, None, name, step) for name in sorted(unlisted)]
    problems += [problem for patch in series for problem in check_patch(patch)]
    if problems := [*problems, *check_needs(series)]:
        raise Problems("the series breaks its rules", problems=problems)
    return series


def check_needs(series: Series) -> list[ToolError]:
    """Patches that a ``Needs:`` header names and that do not stand earlier in the series."""
    listed = [patch.name for patch in series]
    what = "a patch needs one that does not stand before it"
    rule = "Needs: patches that stand earlier in the series"
    problems = []
    for number, patch in enumerate(series):
        for need in (name for name in patch.needs if name not in listed[:number]):
            found = f"{need}, which {'stands later' if need in listed else 'is not in the series'}"
            problems.append(ToolError(what, patch.name, rule, found, _REWORD))
    return problems


def check_patch(patch: Patch) -> list[ToolError]:
    """Every rule that the patch breaks by itself."""
    try:
        return [*_check_message(patch), *check_files(patch), *_check_lines(patch)]
    except ToolError as problem:  # the diff cannot be read
        return [problem]


def _check_message(patch: Patch) -> Iterator[ToolError]:
    lines, name = patch.body.splitlines(), patch.name
    if not slug(patch.subject):
        expected = "Subject: [PATCH] [Area] What it adds"
        yield ToolError("the patch has no subject", name, expected, patch.subject, _REWORD)
    for header, (right, expected) in HEADERS.items():
        found = [line for line in lines if re.match(rf"\s*{header}\s*[:=]", line, re.IGNORECASE)]
        good = [line for line in found if re.fullmatch(right, line.rstrip())]
        if found != good or (len(found) != 1 and header != "Needs"):
            what, said = f"{header} is missing or not as it should be", " / ".join(found)
            yield ToolError(what, name, expected, said or "no such line", _REWORD)
    if (expected := f"Signed-off-by: {IDENTITY}") not in lines:
        found = [line for line in lines if re.match(r"\s*signed\W*off\W*by", line, re.IGNORECASE)]
        what, said = "the project's Signed-off-by is missing", " / ".join(found)
        yield ToolError(what, name, expected, said or "no such line", _SIGN)
    if not any(line.strip() and not _HEADER.fullmatch(line) for line in lines):
        expected = "why the patch is needed and what a user sees"
        yield ToolError("the message has no body", name, expected, next_step=_REWORD)


def check_files(patch: Patch) -> Iterator[ToolError]:
    """What a patch may not change. Paths outside the tree are refused by git."""
    step = "take that file out of the commit, then: series export"
    for file in patch.diff:
        if file.is_binary_file:
            yield ToolError("a binary file is changed", patch.name, "text", file.path, step)
        if file.is_symlink or file.is_submodule:
            yield ToolError("a link is changed", patch.name, "a regular file", file.path, step)
    if not patch.diff:
        step = "drop the commit, then: series export"
        yield ToolError("the patch changes nothing", patch.name, next_step=step)


def _check_lines(patch: Patch) -> Iterator[ToolError]:
    before = patch.data[: len(patch.data) - len(patch.diff_bytes)].count(b"\n")
    bad = [
        f"{patch.name}:{before + (line.diff_line_no or 0)} ({file.path}:{line.target_line_no})"
        for file in patch.diff
        for hunk in file
        for line in hunk
        if line.is_added and _BAD_LINE.search(line.value)
    ]
    if bad:
        what = "added lines end in blanks, or are conflict markers"
        step = "remove them in the commit, then: series export"
        yield ToolError(what, patch.name, "none", ", ".join(bad), step)
