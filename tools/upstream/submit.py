# SPDX-License-Identifier: Apache-2.0
"""Patches as a branch that a person can send to vLLM, and the text of the pull request."""

import argparse
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path

from tools.common.cli import Problems, ToolError, add_path, count
from tools.common.files import write
from tools.common.git import Git
from tools.common.pin import Project
from tools.series.apply import apply_series, scratch_worktree
from tools.series.check import check_needs
from tools.series.series import OWN_HEADER, Patch, choose, read_series, with_needs
from tools.series.tree import APPLIED_REF, BASE_REF, identity
from tools.upstream.testrun import is_test_file

_SENDABLE = ("Pending", "Submitted")
# A header's next lines begin with a blank. Nobody reads mail at .invalid: it is the project's.
_NOT_SENT = re.compile(
    rf"^(?:{OWN_HEADER.pattern}.*(?:\n[ \t].*)*|Signed-off-by: .*\.invalid>[ \t]*)\n?", re.M
)
_TRAILER = re.compile(r"^[A-Z][A-Za-z-]+-by: .*\n?", re.MULTILINE)
_TEMPLATE = ".github/PULL_REQUEST_TEMPLATE.md"
_REQUEST = """\
<!-- A draft on {label}. Nothing was sent: read every line, fill in the dots, then
     send it yourself. Remove this comment. -->

Title: {title}

## Purpose

{purpose}

## Test Plan

```bash
{commands}
pre-commit run --files {files}
```

## Test Result

... (run the plan on {label}, put the output here)

## Statements

- Not a duplicate because: ... (what `gh issue view` and `gh pr list --repo \
vllm-project/vllm --state open --search "..."` found)
- AI assistance: ... (which, for what; every changed line was read by: ...)

---
{checklist}
"""


def declare(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("patches", nargs="+", metavar="PATCH", help="of the series")
    add_path(parser, "--clone", "your clone of vLLM: it gets the branch", required=True)
    text = "where it starts, in the clone"
    parser.add_argument("--onto", metavar="REF", required=True, help=text)
    parser.add_argument("--branch", help="its name (default: as the first patch)")


def run(arguments: argparse.Namespace, project: Project) -> None:
    """Make a branch for vLLM with the patches that you name, and with the patches that they need.
    You sign them off (git config). The text of the pull request is written too. Nothing is pushed:
    you read it, answer for it and send it."""
    series, label = read_series(project.series_file), arguments.onto
    chosen = choose(series, arguments.patches)
    for patch in chosen:
        if not patch.status.startswith(_SENDABLE):
            expected = f"Upstream-Status: {' or '.join(_SENDABLE)}"
            raise ToolError("a patch is not for upstream", patch.name, expected, patch.status)
    if problems := check_needs(series):
        raise Problems("the series breaks its rules", problems=problems)
    apply_series(project, series)
    clone, who = Git(arguments.clone), find_person(arguments.clone)
    base = clone.commit_id(label)
    if base is None:
        step = "git fetch --tags origin"
        raise ToolError("the clone has no such ref", clone.path, None, label, step)
    inside = with_needs(series, [patch.name for patch in chosen])
    commits = Git(project.tree).commits(f"{BASE_REF}..{APPLIED_REF}")
    stack = [pair for pair in zip(series, commits, strict=True) if pair[0].name in inside]
    clone.fetch(project.tree, "--no-write-fetch-head", APPLIED_REF)
    with scratch_worktree(clone, base, project.build / "submit") as git:
        for patch, commit in stack:
            pick(git, patch, commit, label, who)
        head = git.text("rev-parse", "HEAD")
    branch = arguments.branch or chosen[0].name.removesuffix(".patch")
    clone.run("branch", "--no-track", branch, head)  # refuses a branch that exists
    template = clone.text("show", f"{base}:{_TEMPLATE}", accept=(0, 128))
    below = [patch for patch, _ in stack if patch not in chosen]
    path = project.build / "submit" / f"{branch.replace('/', '-')}.md"
    write(path, render_request(label, chosen, below, template))
    print(f"branch {branch}: {', '.join(patch.name for patch in chosen)}")
    if below:
        print(f"stacked on {', '.join(patch.name for patch in below)}: these go first, or with it")
    print(f"pull request: {path}")
    print("Nothing was pushed. Read every changed line, run the test plan, fill in the dots.")


def find_person(clone: Path) -> tuple[str, str]:
    """Name and address that git would commit with in a clone; a placeholder is refused."""
    if not (clone / ".git").exists():
        raise ToolError("this is not the top directory of a clone of vLLM", clone)
    # With the user's own configuration, which the tools read nowhere else.
    command = ["git", "-c", "user.useConfigOnly=true", "var", "GIT_COMMITTER_IDENT"]
    said = subprocess.run(command, cwd=clone, capture_output=True, text=True).stdout
    match = re.match(r"(.+) <(\S+@\S+\.\S+)> ", said)
    if not match or match[2].endswith(".invalid"):
        what = "a sign-off is a person's, and git knows no person here"
        step = "git config --global user.name '...'; git config --global user.email '...'"
        raise ToolError(what, clone, None, said.strip() or "nobody", step)
    return match[1], match[2]


def message_for(patch: Patch) -> str:
    """The commit message for upstream: without the series' own headers and sign-off."""
    body = _NOT_SENT.sub("", patch.body).strip()
    return re.sub(r"\n{3,}", "\n\n", f"{patch.subject}\n\n{body}\n")


def pick(git: Git, patch: Patch, commit: str, label: str, who: tuple[str, str]) -> None:
    """Put a patch on top, as the person's own commit."""
    if git.run("cherry-pick", "--no-commit", commit, accept=(0, 1)).returncode:
        found = "conflicts in " + ", ".join(git.changed("--diff-filter=U"))
        step = "put the patch that it needs into its Needs:; or choose a base nearer to the pin"
        raise ToolError(f"a patch does not fit {label}", patch.name, None, found, step)
    if not git.changed("--cached", "HEAD"):
        raise ToolError(f"{label} contains a patch already", patch.name)
    words = ("commit", "--quiet", "--cleanup=verbatim", "--signoff", "-F", "-")
    env = identity(git.log(commit, "%aI"), *who)
    git.run(*words, stdin=message_for(patch).encode(), env=env)


def render_request(
    label: str, patches: Sequence[Patch], below: Sequence[Patch], template: str
) -> str:
    """The pull request's text; ``below`` are patches of other pull requests in the branch."""
    changed = (file for patch in patches for file in patch.diff if not file.is_removed_file)
    files = sorted({file.path for file in changed})
    purpose = []
    for patch in patches:
        purpose += [f"### {patch.subject}"] if len(patches) > 1 else []
        purpose.append(_TRAILER.sub("", message_for(patch).partition("\n\n")[2]).strip())
    if below:
        purpose += [
            f"**Stacked.** This branch also has {count(len(below), 'commit')} of other pull "
            f"requests. Review only the other {count(len(patches), 'commit')}. Not for review:",
            "\n".join(f"- {patch.subject}" for patch in below),
        ]
    commands = [f".venv/bin/python -m pytest {file} -v" for file in files if is_test_file(file)]
    # Upstream's own checklist, unticked: the person ticks it.
    match = re.search(r"<details>.*</details>", template, re.DOTALL)
    text = _REQUEST.format(
        label=label,
        title=f"{patches[0].subject}{' (and more)' if len(patches) > 1 else ''}",
        purpose="\n\n".join(purpose),
        commands="\n".join(commands),
        files=" ".join(files),
        checklist=match[0] if match else template,
    )
    return re.sub(r"\n{3,}", "\n\n", text)
