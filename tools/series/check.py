# SPDX-License-Identifier: Apache-2.0
"""The rules of the series: what breaks them, and what to do."""

import argparse
import re
from collections.abc import Iterator

from tools.common.cli import Problems, ToolError
from tools.common.pin import Project
from tools.series.patch import IDENTITY, OWN_HEADER, STATUS, STATUSES, Patch, check_files, slug
from tools.series.series import Series, read_series

# For each header: the pattern of a correct line, and the text to show.
_HEADERS = {
    "Upstream-Status": (
        STATUS.pattern,
        "Upstream-Status: " + "\n            or: ".join(STATUSES.values()),
    ),
    "Drop-when": (
        r"Drop-when: \S.*",
        "Drop-when: the condition under which nobody needs the patch",
    ),
    "Needs": (
        r"Needs: [^,\s]+\.patch(?:, [^,\s]+\.patch)*",
        "Needs: one.patch, another.patch (or no such line)",
    ),
}
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
    what, rule = "a patch is not in the series", "every .patch file listed"
    step = "add it to the series or delete the file"
    problems = [ToolError(what, file, rule, name, step) for name in sorted(unlisted)]
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
        found = check_files(patch)
    except ToolError as problem:
        return [problem]
    message = [ToolError(what, patch.name, *rest) for what, *rest in _check_message(patch)]
    return [*message, *found, *_check_lines(patch)]


def _check_message(patch: Patch) -> Iterator[tuple[str, str, str, str]]:
    """What is wrong, what should stand there, what does, and the next step."""
    lines = patch.body.splitlines()
    if not slug(patch.subject):
        expected = "Subject: [PATCH] [Area] What it adds"
        yield "the patch has no subject", expected, patch.subject or "nothing", _REWORD
    for name, (right, expected) in _HEADERS.items():
        found = [line for line in lines if re.match(rf"\s*{name}\s*[:=]", line, re.IGNORECASE)]
        good = [line for line in found if re.fullmatch(right, line.rstrip())]
        if found != good or (len(found) != 1 and name != "Needs"):
            said = " / ".join(found) or "no such line"
            yield f"{name} is missing or not as it should be", expected, said, _REWORD
    expected = f"Signed-off-by: {IDENTITY}"
    if expected not in lines:
        found = [line for line in lines if re.match(r"\s*signed\W*off\W*by", line, re.IGNORECASE)]
        what = "the project's Signed-off-by is missing"
        yield what, expected, " / ".join(found) or "no such line", _SIGN
    if not any(line.strip() and not _HEADER.fullmatch(line) for line in lines):
        expected = "why the patch is needed and what a user sees"
        yield "the message has no body", expected, "only a subject and headers", _REWORD


def _check_lines(patch: Patch) -> list[ToolError]:
    before = patch.data[: len(patch.data) - len(patch.diff_bytes)].count(b"\n")
    bad = [
        f"{patch.name}:{before + (line.diff_line_no or 0)} ({file.path}:{line.target_line_no})"
        for file in patch.diff
        for hunk in file
        for line in hunk
        if line.is_added and _BAD_LINE.search(line.value)
    ]
    what, step = "added lines end in blanks, or are conflict markers", "remove them in the commit"
    step += ", then: series export"
    return [ToolError(what, patch.name, "none", ", ".join(bad), step)] if bad else []
