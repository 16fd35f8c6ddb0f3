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
_WAITING = re.compile(r"(fixup|squash|amend)!")
_REWORD = "reword the commit (in the build tree: git rebase -i refs/re/base), then: series export"
_SIGN = "in the build tree: git rebase --signoff refs/re/base, then: series export"


def run(arguments: argparse.Namespace, project: Project) -> None:
    """Check the series and every patch's message against the rules. Each listed file exists. No
    file is listed twice or left out. Headers, message body and sign-off are right. Each patch that
    a Needs: header names exists and stands earlier."""
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


def check_patch(patch: Patch) -> Iterator[ToolError]:
    """Every rule that the message breaks. Git checks the diff when it applies it."""
    lines, name = patch.body.splitlines(), patch.name
    if not slug(patch.subject) or _WAITING.match(patch.subject):
        expected = "Subject: [PATCH] [Area] What it adds"
        what = "the patch has no subject of its own"
        yield ToolError(what, name, expected, patch.subject, _REWORD)
    for header, (right, expected) in HEADERS.items():
        found = [line for line in lines if re.match(rf"\s*{header}\s*[:=]", line, re.IGNORECASE)]
        good = [line for line in found if re.fullmatch(right, line.rstrip())]
        if found != good or (len(found) != 1 and header != "Needs"):
            what, said = f"{header} is missing or not as it should be", " / ".join(found)
            yield ToolError(what, name, f"{header}: {expected}", said or "no such line", _REWORD)
    if (expected := f"Signed-off-by: {IDENTITY}") not in lines:
        found = [line for line in lines if re.match(r"\s*signed\W*off\W*by", line, re.IGNORECASE)]
        what, said = "the project's Signed-off-by is missing", " / ".join(found)
        yield ToolError(what, name, expected, said or "no such line", _SIGN)
    if not any(line.strip() and not _HEADER.fullmatch(line) for line in lines):
        expected = "why the patch is needed and what a user sees"
        yield ToolError("the message has no body", name, expected, next_step=_REWORD)
