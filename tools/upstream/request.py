# SPDX-License-Identifier: Apache-2.0
"""The text of a pull request to vLLM, as a draft that a person completes and sends."""

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from tools.common.cli import count, table
from tools.common.git import Git
from tools.series.patch import OWN_HEADER, PROJECT_EMAIL, Patch
from tools.upstream.check_patches import Finding, tell_failed
from tools.upstream.testrun import is_test_file

_TEMPLATE = ".github/PULL_REQUEST_TEMPLATE.md"
_TRAILER = re.compile(r"[A-Z][A-Za-z-]+-by: ")
# A header's next lines begin with a blank.
_OWN_HEADERS = re.compile(rf"^{OWN_HEADER.pattern}.*(?:\n[ \t].*)*\n?", re.MULTILINE)
_lines, _paragraphs = "\n".join, "\n\n".join


def split_body(patch: Patch) -> tuple[list[str], list[str]]:
    """The lines of a message that upstream gets, and the trailers among them apart."""
    body = _OWN_HEADERS.sub("", patch.body).strip()
    lines = [line for line in body.splitlines() if PROJECT_EMAIL not in line]
    trailers = [line for line in lines if _TRAILER.match(line)]
    return [line for line in lines if line not in trailers], trailers


class Base(NamedTuple):
    """Where branches start: a commit, and the repository that gets them."""

    git: Git
    commit: str
    label: str


def render_request(
    base: Base, patches: Sequence[Patch], below: int, head: str, findings: Mapping[str, Finding]
) -> str:
    """The pull request's text, after the template that the base has.

    ``head`` is the branch: ``below`` commits of other pull requests, then the patches.
    """
    git, label = base.git, base.label
    files = [c.path for c in git.changes(f"{head}~{len(patches)}", head) if c.status != "D"]
    purpose, tested = [], []
    for patch in patches:
        why, how = _parts(patch)
        purpose += [f"### {patch.subject}", why] if len(patches) > 1 else [why]
        tested.append(how)
    if below:
        last = "commit" if len(patches) == 1 else f"{len(patches)} commits"
        subjects = (git.subject(commit) for commit in git.commits(f"{base.commit}..{head}")[:below])
        purpose += [
            f"**Stacked.** This branch stands on {count(below, 'commit')} of other pull requests, "
            f"to be reviewed first; this one is about the last {last}. Below it:",
            _lines(f"- {subject}" for subject in subjects),
        ]
    commands = [f".venv/bin/python -m pytest {file} -v" for file in files if is_test_file(file)]
    commands.append(f"pre-commit run --files {' '.join(files)}")
    keywords = re.sub(r"^(\[[^\]]*\])+\s*", "", patches[0].subject)
    text = f"""\
<!-- A draft on {label}. Nothing was sent: read every line, fill in the dots, then
     send it yourself. Remove this comment. -->

Title: {patches[0].subject}{" (and more)" if len(patches) > 1 else ""}

## Purpose

{_paragraphs(purpose)}

## Test Plan

```bash
{_lines(commands)}
```

{_paragraphs(tested)}

## Test Result

{_lines(_results(findings, label))}

## Statements

- Not a duplicate because: ... (what `gh issue view` and `gh pr list --repo \
vllm-project/vllm --state open --search "{keywords}"` found)
- AI assistance: ... (which, for what; every changed line was read by: ...)

---
{_checklist(base)}
"""
    return re.sub(r"\n{3,}", "\n\n", text)


def _parts(patch: Patch) -> tuple[str, str]:
    """The parts of a message: why the patch exists, and how it was tested."""
    texts = re.split(r"\n\s*\n", _lines(split_body(patch)[0]).strip())
    how = [text for text in texts if re.match(r"Tests?(ed)?:", text)]
    return _paragraphs(text for text in texts if text not in how), _paragraphs(how)


def _results(findings: Mapping[str, Finding], label: str) -> list[str]:
    if not findings:
        return [f"... (not run on this branch yet: run the plan on {label}, put the output here)"]
    rows = [(c, f.said if f.good else f"**failed**: {f.said}") for c, f in findings.items()]
    cells = table(("Check", "Result"), rows)
    return [f"On {label}, on a CPU:", "", *cells, "", *tell_failed(findings)]


def _checklist(base: Base) -> str:
    """Upstream's own checklist, unticked: the person ticks it."""
    text = base.git.read(base.commit, _TEMPLATE) or b"(the base has no template for pull requests)"
    match = re.search(rb"<details>.*</details>", text, re.DOTALL)
    return (match[0] if match else text).decode(errors="replace")
