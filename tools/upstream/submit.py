# SPDX-License-Identifier: Apache-2.0
"""Patches as branches that a person can send to vLLM, and the text of each pull request."""

import argparse
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Sequence
from email.utils import parseaddr
from pathlib import Path

from tools.common.cli import add_flag, add_path, count, tell
from tools.common.errors import Problems, ToolError
from tools.common.files import replace_all
from tools.common.git import Git
from tools.common.pin import Project
from tools.series.apply import apply_series, scratch_worktree
from tools.series.check import check_needs
from tools.series.patch import PROJECT_EMAIL, PROJECT_NAME, Patch
from tools.series.series import Series, choose, read_series, with_needs
from tools.series.target import open_clone, resolve
from tools.series.tree import APPLIED_REF, BASE_REF, identity
from tools.upstream.check_patches import IMPORTS, LINTERS, PACKAGE, TESTS, Checker, Finding, Place
from tools.upstream.request import Base, render_request, split_body
from tools.wheel.verify import find_site

EXAMPLE = "count-rows --clone ../vllm --onto origin/main"
_RULES = ("AGENTS.md", "CONTRIBUTING.md", "docs/contributing/README.md")
_SENDABLE = ("Pending", "Submitted")
Person = tuple[str, str]  # name and address
_BEFORE = """\
Before you push a branch:
  - read every changed line, so that you can defend it,
  - look for issues and pull requests that do the same,
  - run the test plan, and fill in the dots of the text,
  - say where AI helped (--trailer 'Assisted-by: ...', and in the text)."""


def declare(parser: argparse.ArgumentParser) -> None:
    which = "which (default: all that are Pending)"
    parser.add_argument("patches", nargs="*", metavar="PATCH", help=which)
    add_path(parser, "--clone", "your clone of vLLM: it gets the branches")
    parser.add_argument("--onto", metavar="REF", help="where they start, in the clone")
    parser.add_argument("--topic", metavar="BRANCH", help="one branch of all the patches")
    text = "add to each message, as Assisted-by: ... (may be repeated)"
    parser.add_argument("--trailer", action="append", default=[], metavar="'KEY: VALUE'", help=text)
    add_flag(parser, "--replace", "replace branches of these names")
    add_flag(parser, "--test", "check each branch here (on the pin), for the results")


def run(arguments: argparse.Namespace, project: Project) -> None:
    """Make branches for upstream, one per patch or topic, signed off by you (git config), and write
    the text of each pull request. A patch that needs earlier ones stands on them. Stops before
    anything is pushed: you read, own and send it. Without --clone the branches stand on the pinned
    release, in its build tree."""
    base, said = submit(project, arguments)
    print(*said, sep="\n")
    print(f"\nIn {base.git.path}. Nothing was pushed. {_BEFORE}")
    if found := [name for name in _RULES if base.git.read(base.commit, name) is not None]:
        print(f"vLLM's own rules, as of {base.label}: {', '.join(found)}")
    if arguments.clone is None:
        print("These branches have the release's files but not its history: to send one, make it")
        print("in a clone: --clone <path> --onto <ref>")


# Names that RFC 2606 and 6761 set aside: nobody reads mail there.
_RESERVED = re.compile(r"(.*\.)?(example(\.\w+)?|invalid|test|localhost|local)", re.IGNORECASE)
_NOBODY = {"", "root", "user", "nobody", "unknown", "your name", "you", PROJECT_NAME.lower()}


def find_person(repository: Path) -> Person:
    """Name and address that git would commit with in a repository; a placeholder is refused."""
    # The user's own configuration, which the tools read nowhere else.
    settings = {k: v for k, v in os.environ.items() if not k.startswith("GIT_") or "CONFIG" in k}
    command = ["git", "-C", str(repository), "config", "--get"]
    name, email = (
        subprocess.run([*command, key], env=settings, capture_output=True, text=True).stdout.strip()
        for key in ("user.name", "user.email")
    )
    domain = email.rpartition("@")[2]
    problem = None
    if name.lower() in _NOBODY:
        problem = f"user.name is {name!r}"
    elif email != parseaddr(f"x <{email}>")[1] or "." not in domain or _RESERVED.fullmatch(domain):
        problem = f"user.email is {email!r}"
    elif email == PROJECT_EMAIL:
        problem = f"user.email is that of the series, {email!r}"
    if problem:
        what = "a sign-off is a person's, and git knows no person here"
        expected = "the name and the address of who answers for the patch"
        step = "git config --global user.name '...'; git config --global user.email '...'"
        raise ToolError(what, repository, expected, problem, step)
    return name, email


def find_base(project: Project, onto: str | None, clone: Path | None) -> Base:
    """The pinned release in the build tree, or a ref of a clone."""
    if clone and onto:
        git = open_clone(clone)
        return Base(git, resolve(git, onto), onto)
    if clone or onto:
        what = "a clone and the ref of it that the branches start from belong together"
        step = "name both: --clone <path> --onto origin/main"
        raise ToolError(what, found=clone or f"--onto {onto}", next_step=step)
    git = Git(project.tree)
    return Base(git, git.text("rev-parse", BASE_REF), f"vLLM {project.pin.version}")


def choose_patches(series: Series, names: Sequence[str]) -> list[Patch]:
    """The named patches in the order of the series, or all that are Pending."""
    chosen = choose(series, names) or [p for p in series if p.status.startswith("Pending")]
    if not chosen:
        step = "name one: upstream submit <patch>"
        raise ToolError("no patch of the series is Pending", next_step=step)
    if kept := [p for p in chosen if not p.status.startswith(_SENDABLE)]:
        expected = f"Upstream-Status: {' or '.join(_SENDABLE)}"
        step = "leave it out, or change its status: CONTRIBUTING.md, Editing a patch"
        name, status = kept[0].name, kept[0].status
        raise ToolError("a patch is not for upstream", name, expected, status, step)
    return chosen


def message_for(patch: Patch, person: Person, trailers: Sequence[str]) -> str:
    """The commit message for upstream: without the series' own headers, signed by the person."""
    kept, signed = split_body(patch)
    body = re.sub(r"\n{3,}", "\n\n", "\n".join(kept)).strip()
    last = [*signed, *trailers, "Signed-off-by: {} <{}>".format(*person)]
    return f"{patch.subject}\n\n{body}\n\n" + "\n".join(dict.fromkeys(last)) + "\n"


def _refuse_words(topic: str | None, trailers: Sequence[str]) -> None:
    if topic is not None and not re.fullmatch(r"[a-z0-9][a-z0-9._/-]*", topic):
        what, expected = "this is no name for a branch", "lower-case letters, digits, . _ / -"
        raise ToolError(what, where="--topic", expected=expected, found=topic)
    for trailer in trailers:
        if not re.fullmatch(r"[A-Z][A-Za-z]*(-[A-Za-z]+)+: \S.*", trailer):
            what = "this is not a trailer of a commit message"
            expected = "Key-words: value, such as Assisted-by: a tool"
            raise ToolError(what, where="--trailer", expected=expected, found=trailer)


def make_branch(
    git: Git, base: Base, patches: Iterable[tuple[Patch, str]], person: Person, trailers: list[str]
) -> str:
    """Merge patches, each with its commit, onto the base in a work tree; return the last commit."""
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
        message = message_for(patch, person, trailers).encode()
        who = identity(git.log(commit, "%aI"), *person)
        git.run("commit", "--quiet", "--cleanup=verbatim", "-F", "-", stdin=message, env=who)
    return git.text("rev-parse", "HEAD")


def submit(project: Project, asked: argparse.Namespace) -> tuple[Base, list[str]]:
    """Make the branches and write the texts, all of them or none; what to tell of each."""
    series = read_series(project.series_file)
    chosen = choose_patches(series, asked.patches)
    _refuse_words(asked.topic, asked.trailer)
    if problems := check_needs(series):
        raise Problems("the series breaks its rules", problems=problems)
    apply_series(project, series)
    base = find_base(project, asked.onto, asked.clone)
    person = find_person(asked.clone or project.root)
    if asked.test and base.git.tree_id(base.commit) != project.pin.tree:
        what = "tests run only on the pinned release: the installed kernels are of it"
        step = "leave --test out, and run the test plan in the clone"
        raise ToolError(what, "--test", f"vLLM {project.pin.version}", base.label, step)
    commits = Git(project.tree).commits(f"{BASE_REF}..{APPLIED_REF}")
    base.git.fetch(project.tree, "--no-write-fetch-head", APPLIED_REF)
    groups = {p.name.removesuffix(".patch"): [p] for p in chosen}
    if asked.topic:
        groups = {asked.topic: chosen}
    heads: dict[str, str] = {}
    said: list[str] = []
    texts: dict[Path, bytes | None] = {}
    with scratch_worktree(base.git, base.commit, project.build / "submit") as git:
        for name, patches in groups.items():
            mine = [patch.name for patch in patches]
            inside = with_needs(series, mine)
            stack = [pair for pair in zip(series, commits, strict=True) if pair[0].name in inside]
            head = make_branch(git, base, stack, person, asked.trailer)
            below = [other for other in inside if other not in mine]
            tell(f"{name}: {count(len(inside), 'commit')} on {base.label}")
            old = base.git.commit_id(f"refs/heads/{name}")
            in_use = name == base.git.current_branch()
            if old and old != head and (in_use or not asked.replace):
                what, found = "a branch of this name exists; no branch was made", base.git.log(old)
                where = f"{base.git.path}, {name}{' (checked out)' if in_use else ''}"
                step = "look at it, then: --replace; or another name: --topic"
                raise ToolError(what, where, found=found, next_step=step)
            findings = _check(project, git, base.commit, head, len(mine)) if asked.test else {}
            path = project.build / "submit" / f"{name.replace('/', '-')}.md"
            texts[path] = render_request(base, patches, len(below), head, findings).encode()
            heads[name] = head
            said.append(f"branch {name}{' (as it was)' if old == head else ''}: {', '.join(mine)}")
            if below:
                said.append(f"  stacked on {', '.join(below)}: these go first, or with it")
            said.append(f"  pull request: {path}")
        lines = [f"update refs/heads/{name} {head}\n" for name, head in heads.items()]
        refs = "".join(lines).encode()
        replace_all(texts, lambda: base.git.run("update-ref", "--stdin", stdin=refs))
    return base, said


def _check(project: Project, git: Git, base: str, head: str, number: int) -> dict[str, Finding]:
    """Check the last commits of a branch together, with the kernels that are installed."""
    place = Place(git.text("rev-parse", f"{head}~{number}"), head)
    build = project.build / "submit-checks"
    checker = Checker(git, find_site(Path(sys.executable)), build, base)
    findings = {}
    for check in (IMPORTS, LINTERS, TESTS):
        findings[check] = checker.check(place, check)
        tell(f"  {check}: {findings[check]}")
    shutil.rmtree(build / PACKAGE, ignore_errors=True)  # else it stays a work tree of the clone
    return findings
