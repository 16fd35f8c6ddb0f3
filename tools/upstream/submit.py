# SPDX-License-Identifier: Apache-2.0
"""Patches as branches that a person can send to vLLM, and the text of each pull request."""

import argparse
import re
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from tools.common.cli import Problems, ToolError, count
from tools.common.files import write
from tools.common.git import Git
from tools.common.pin import Project
from tools.series.apply import apply_series, scratch_worktree
from tools.series.check import check_needs
from tools.series.patch import OWN_HEADER, Patch
from tools.series.series import Series, choose, read_series, with_needs
from tools.series.tree import APPLIED_REF, BASE_REF, identity
from tools.upstream.testrun import is_test_file

_SENDABLE = ("Pending", "Submitted")
# A header's next lines begin with a blank.
_OWN_HEADERS = re.compile(rf"^{OWN_HEADER.pattern}.*(?:\n[ \t].*)*\n?", re.MULTILINE)
_TRAILER = re.compile(r"^[A-Z][A-Za-z-]+-by: .*\n?", re.MULTILINE)
# Names that RFC 2606 and 6761 set aside: nobody reads mail there.
_RESERVED = re.compile(r"(.*\.)?(example(\.\w+)?|invalid|test|localhost|local)", re.IGNORECASE)
_SIGNED_BY_NOBODY = re.compile(rf"^Signed-off-by: .*@{_RESERVED.pattern}>[ \t]*\n?", re.M | re.I)
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
```

## Test Result

... (run the plan on {label}, put the output here)

## Statements

- Not a duplicate because: ... (what `gh issue view` and `gh pr list --repo \
vllm-project/vllm --state open --search "{keywords}"` found)
- AI assistance: ... (which, for what; every changed line was read by: ...)

---
{checklist}
"""


class Base(NamedTuple):
    """Where branches start: a commit of a clone, which gets them."""

    git: Git
    commit: str
    label: str


def declare(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("patches", nargs="+", metavar="PATCH", help="of the series")
    text = "your clone of vLLM: it gets the branches"
    parser.add_argument("--clone", type=Path, required=True, help=text)
    text = "where they start, in the clone"
    parser.add_argument("--onto", metavar="REF", required=True, help=text)
    parser.add_argument("--topic", metavar="BRANCH", help="one branch of all the patches")


def run(arguments: argparse.Namespace, project: Project) -> None:
    """Make branches for upstream, one per patch or topic, signed off by you (git config), and write
    the text of each pull request. A patch that needs earlier ones stands on them. Stops before
    anything is pushed: you read, own and send it."""
    series, topic = read_series(project.series_file), arguments.topic
    chosen = choose(series, arguments.patches)
    if kept := [patch for patch in chosen if not patch.status.startswith(_SENDABLE)]:
        expected = f"Upstream-Status: {' or '.join(_SENDABLE)}"
        step = "leave it out, or change its status: CONTRIBUTING.md, Editing a patch"
        name, status = kept[0].name, kept[0].status
        raise ToolError("a patch is not for upstream", name, expected, status, step)
    if problems := check_needs(series):
        raise Problems("the series breaks its rules", problems=problems)
    apply_series(project, series)
    git = open_clone(arguments.clone)
    base = Base(git, resolve(git, arguments.onto), arguments.onto)
    groups = {topic: chosen} if topic else {p.name.removesuffix(".patch"): [p] for p in chosen}
    print(*submit(project, series, base, find_person(arguments.clone), groups), sep="\n")
    print("Nothing was pushed. Read every changed line, run the test plan, fill in the dots.")


def open_clone(path: Path) -> Git:
    """The repository at ``path``, which must be the top directory of a clone."""
    if not (path / ".git").exists():
        what, step = "this is not a clone of vLLM", "name the top directory of one: --clone <path>"
        raise ToolError(what, path, "a directory with .git", next_step=step)
    return Git(path)


def resolve(git: Git, ref: str) -> str:
    """The commit that a ref of the clone names; ``1.2.3`` may name the tag ``v1.2.3``."""
    found = None if ref.startswith("-") else git.commit_id(ref) or git.commit_id(f"v{ref}")
    if found is None:
        step = f"fetch it: git -C {git.path} fetch --tags origin"
        what, expected = "the clone has no such ref", "a tag, a branch or a commit"
        raise ToolError(what, git.path, expected, ref, step)
    return found


def find_person(repository: Path) -> tuple[str, str]:
    """Name and address that git would commit with in a repository; a placeholder is refused."""
    # With the user's own configuration, which the tools read nowhere else.
    command = ["git", "-C", str(repository), "-c", "user.useConfigOnly=true"]
    command += ["var", "GIT_COMMITTER_IDENT"]
    said = subprocess.run(command, capture_output=True, text=True).stdout
    match = re.match(r"(.+) <(\S+@(\S+\.\S+))> ", said)
    if not match or _RESERVED.fullmatch(match[3]):
        what = "a sign-off is a person's, and git knows no person here"
        expected = "the name and the address of who answers for the patch"
        step = "git config --global user.name '...'; git config --global user.email '...'"
        raise ToolError(what, repository, expected, said.strip() or "nobody", step)
    return match[1], match[2]


def message_for(patch: Patch) -> str:
    """The commit message for upstream: without the series' own headers and sign-offs by nobody."""
    body = _SIGNED_BY_NOBODY.sub("", _OWN_HEADERS.sub("", patch.body)).strip()
    return re.sub(r"\n{3,}", "\n\n", f"{patch.subject}\n\n{body}\n")


def make_branch(
    git: Git, base: Base, patches: Iterable[tuple[Patch, str]], who: tuple[str, str]
) -> str:
    """Pick patches, each with its commit, onto the base in a work tree; return the last commit."""
    git.run("reset", "--quiet", "--hard", base.commit)
    for patch, commit in patches:
        if git.run("cherry-pick", "--no-commit", commit, accept=(0, 1)).returncode:
            what = f"a patch does not fit {base.label}; no branch was made"
            found = f"conflicts in {', '.join(git.unmerged())}"
            step = "name the patch that it stands on in its Needs:, choose a base nearer to the pin"
            step += ", or move the series there first: series rebase --onto <version>"
            raise ToolError(what, patch.name, found=found, next_step=step)
        if not git.differs("--cached", "HEAD"):
            what = f"{base.label} contains a patch already; no branch was made"
            step = "leave it out; series rebase --onto drops it from the series"
            raise ToolError(what, where=patch.name, next_step=step)
        words = ("commit", "--quiet", "--cleanup=verbatim", "--signoff", "-F", "-")
        env = identity(git.log(commit, "%aI"), *who)
        git.run(*words, stdin=message_for(patch).encode(), env=env)
    return git.text("rev-parse", "HEAD")


def submit(
    project: Project,
    series: Series,
    base: Base,
    who: tuple[str, str],
    groups: dict[str, list[Patch]],
) -> list[str]:
    """Write the texts and make the branches, all of them or none; tell of each."""
    commits = Git(project.tree).commits(f"{BASE_REF}..{APPLIED_REF}")
    base.git.fetch(project.tree, "--no-write-fetch-head", APPLIED_REF)
    refs, said = "", []
    texts: dict[Path, str] = {}
    with scratch_worktree(base.git, base.commit, project.build / "submit") as git:
        for name, patches in groups.items():
            mine = [patch.name for patch in patches]
            inside = with_needs(series, mine)
            stack = [pair for pair in zip(series, commits, strict=True) if pair[0].name in inside]
            head = make_branch(git, base, stack, who)
            below = [patch for patch, _ in stack if patch.name not in mine]
            old = base.git.commit_id(f"refs/heads/{name}")
            if old and old != head:
                what, found = "a branch of this name exists; no branch was made", base.git.log(old)
                step = f"delete it: git -C {base.git.path} branch -D {name}; or: --topic"
                raise ToolError(what, name, found=found, next_step=step)
            path = project.build / "submit" / f"{name.replace('/', '-')}.md"
            texts[path] = render_request(base, patches, below)
            refs += f"update refs/heads/{name} {head}\n"
            said.append(f"branch {name}: {', '.join(mine)}")
            if below:
                names = ", ".join(patch.name for patch in below)
                said.append(f"  stacked on {names}: these go first, or with it")
            said.append(f"  pull request: {path}")
        for path, text in texts.items():
            write(path, text)
        base.git.run("update-ref", "--stdin", stdin=refs.encode())
    return said


def render_request(base: Base, patches: Sequence[Patch], below: Sequence[Patch]) -> str:
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
    template = (
        base.git.read(base.commit, _TEMPLATE) or b"(the base has no template for pull requests)"
    )
    match = re.search(rb"<details>.*</details>", template, re.DOTALL)
    text = _REQUEST.format(
        label=base.label,
        title=f"{patches[0].subject}{' (and more)' if len(patches) > 1 else ''}",
        purpose="\n\n".join(purpose),
        commands="\n".join([*commands, f"pre-commit run --files {' '.join(files)}"]),
        keywords=re.sub(r"^(\[[^\]]*\])+\s*", "", patches[0].subject),
        checklist=(match[0] if match else template).decode(errors="replace"),
    )
    return re.sub(r"\n{3,}", "\n\n", text)
