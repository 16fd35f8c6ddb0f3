# SPDX-License-Identifier: Apache-2.0
"""Patches as branches that a person can send to vLLM, and the text of each pull request.

Nothing here pushes. A branch holds the patch and, below it, the earlier patches that it needs:
those that its ``Needs:`` header names and, where it does not fit, those that touch the same files.
Author and sign-off are the person's.
"""

import argparse
import re
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from tools.common.cli import add_flag, add_many, add_path, tell
from tools.common.errors import Problems, ToolError
from tools.common.files import replacing_all, staging
from tools.common.git import Git
from tools.common.pin import Project
from tools.series.apply import apply_series
from tools.series.check import check_needs
from tools.series.patch import Patch
from tools.series.series import Series, read_series, with_needs
from tools.series.target import open_clone, resolve
from tools.series.tree import APPLIED_REF, BASE_REF, identity
from tools.upstream.check_patches import IMPORTS, LINTERS, TESTS, Checker, Finding, Place
from tools.upstream.person import Person, find_person
from tools.upstream.request import count_commits, render_request, split_body
from tools.wheel.verify import find_site

EXAMPLE = "count-rows --clone ../vllm --onto origin/main"
_RULES = ("AGENTS.md", "CONTRIBUTING.md", "docs/contributing/README.md")
_SENDABLE = ("Pending", "Submitted")


def declare(parser: argparse.ArgumentParser) -> None:
    which = "which (default: all that are Pending)"
    parser.add_argument("patches", nargs="*", metavar="PATCH", help=which)
    add_path(parser, "--clone", "your clone of vLLM: it gets the branches")
    parser.add_argument("--onto", metavar="REF", help="where they start, in the clone")
    parser.add_argument("--topic", metavar="BRANCH", help="one branch of all the patches")
    add_many(parser, "--trailer", "'KEY: VALUE'", "add to each message, as Assisted-by: ...")
    add_flag(parser, "--replace", "replace branches of these names")
    add_flag(parser, "--test", "check each branch here (on the pin), for the results")


def run(arguments: argparse.Namespace, project: Project) -> None:
    """Make branches for upstream, one per patch or topic, signed off by you (git config), and write
    the text of each pull request. A patch that needs earlier ones stands on them. Stops before
    anything is pushed: you read, own and send it. Without --clone the branches stand on the pinned
    release, in its build tree."""
    base, branches = submit(project, arguments)
    for branch in branches:
        state = "" if branch.fresh else " (as it was)"
        print(f"branch {branch.name}{state}: {', '.join(branch.patches)}")
        if branch.below:
            print(f"  stacked on {', '.join(branch.below)}: these go first, or with it")
        print(f"  pull request: {branch.text}")
    print(
        f"\nIn {base.git.path}. Nothing was pushed. Before you push a branch:\n"
        "  - read every changed line, so that you can defend it,\n"
        "  - look for issues and pull requests that do the same,\n"
        "  - run the test plan, and fill in the dots of the text,\n"
        "  - say where AI helped (--trailer 'Assisted-by: ...', and in the text)."
    )
    if found := [name for name in _RULES if name in base.git.files(base.commit, name)]:
        print(f"vLLM's own rules, as of {base.label}: {', '.join(found)}")
    if arguments.clone is None:
        print("These branches have the release's files but not its history: to send one, make it")
        print("in a clone: --clone <path> --onto <ref>")


class Base(NamedTuple):
    """Where the branches start: a commit, and the repository that gets them."""

    git: Git
    commit: str
    label: str


class Branch(NamedTuple):
    """One branch that was made."""

    name: str
    patches: tuple[str, ...]  # whose pull request it is
    below: tuple[str, ...]  # patches that it stands on
    text: Path
    fresh: bool


def find_base(project: Project, onto: str | None, clone: Path | None) -> Base:
    """The pinned release in the build tree, or a ref of a clone."""
    if clone is None:
        if onto is not None:
            what = "only a clone has other refs than the pinned release"
            step = "name the clone: --clone <path>"
            raise ToolError(what, where="--onto", found=onto, next_step=step)
        git = Git(project.tree)
        return Base(git, git.text("rev-parse", BASE_REF), f"vLLM {project.pin.version}")
    git = open_clone(clone)
    if onto is None:
        what = "the branches need a ref of the clone to start from"
        raise ToolError(what, where=clone, next_step="name one: --onto origin/main")
    return Base(git, resolve(git, onto), onto)


def choose_patches(series: Series, names: Sequence[str]) -> list[Patch]:
    """The named patches in the order of the series, or all that are Pending."""
    known = {patch.name: patch for patch in series}
    wanted = [name if name.endswith(".patch") else f"{name}.patch" for name in names]
    if unknown := [name for name in wanted if name not in known]:
        expected, found = "one of: " + ", ".join(known), ", ".join(unknown)
        raise ToolError("the series has no such patch", expected=expected, found=found)
    if not wanted:
        wanted = [patch.name for patch in series if patch.status.startswith("Pending")]
    chosen = [patch for patch in series if patch.name in wanted]
    if not chosen:
        step = "name one: upstream submit <patch>"
        raise ToolError("no patch of the series is Pending", next_step=step)
    if kept := [p for p in chosen if not p.status.startswith(_SENDABLE)]:
        raise ToolError(
            "a patch is not for upstream",
            where=kept[0].name,
            expected=f"Upstream-Status: {' or '.join(_SENDABLE)}",
            found=kept[0].status,
            next_step="leave it out, or change its status: CONTRIBUTING.md, Editing a patch",
        )
    return chosen


def message_for(patch: Patch, person: Person, trailers: Sequence[str]) -> str:
    """The commit message for upstream: without the series' own headers, signed by the person."""
    kept, signed = split_body(patch)
    body = re.sub(r"\n{3,}", "\n\n", "\n".join(kept)).strip()
    last = [*signed, *trailers, f"Signed-off-by: {person}"]
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


@contextmanager
def _workshop(project: Project, base: Base) -> Iterator[Git]:
    """A temporary repository that has the commits of the series and of the base."""
    with staging(project.tree.with_name("submit")) as place:
        git = Git(place)
        git.init("work")
        objects = [
            (source.path / source.text("rev-parse", "--git-path", "objects")).resolve()
            for source in (Git(project.tree), base.git)
        ]
        info = place / ".git" / "objects" / "info"
        info.mkdir(exist_ok=True)
        (info / "alternates").write_text("".join(f"{path}\n" for path in dict.fromkeys(objects)))
        shallow = base.git.path / base.git.text("rev-parse", "--git-path", "shallow")
        if shallow.is_file():
            shutil.copy(shallow, place / ".git" / "shallow")
        git.run("checkout", "--quiet", "--detach", base.commit)
        yield git


@dataclass(frozen=True)
class Maker:
    """Makes the commits of branches in a temporary repository."""

    git: Git
    base: Base
    patches: dict[str, Patch]  # by name, in order
    commits: dict[str, str]
    person: Person
    trailers: Sequence[str]

    def stack(self, names: Sequence[str]) -> tuple[list[str], str]:
        """The patches with what they need below them, on the base; their names and last commit.

        Where one does not fit, it needs the last earlier patch that touches the same files too.
        """
        order = list(self.patches)
        inside = set(with_needs(self.patches.values(), names))
        while True:
            listed = sorted(inside, key=order.index)
            failed = self._try(listed)
            if failed is None:
                return listed, self.git.text("rev-parse", "HEAD")
            name, files = failed
            more = [
                other
                for other in order[: order.index(name)]
                if other not in inside and files & {f.path for f in self.patches[other].diff}
            ]
            if not more:
                raise ToolError(
                    f"a patch does not fit {self.base.label}; no branch was made",
                    where=name,
                    found=f"conflicts in {', '.join(sorted(files))}",
                    next_step="move the series there first: series rebase --onto <version>, or "
                    "choose a base nearer to the pin",
                )
            inside |= set(with_needs(self.patches.values(), more[-1:]))

    def _try(self, names: Sequence[str]) -> tuple[str, set[str]] | None:
        """Commit these patches on the base; the first that conflicts, and the files."""
        git = self.git
        git.run("reset", "--quiet", "--hard", self.base.commit)
        for name in names:
            commit = self.commits[name]
            if git.run("cherry-pick", "--no-commit", commit, accept=(0, 1)).returncode:
                files = set(git.text("diff", "--name-only", "--diff-filter=U").splitlines())
                git.run("reset", "--quiet", "--hard")
                return name, files
            if not git.differs("--cached", "HEAD"):
                what = f"{self.base.label} contains a patch already; no branch was made"
                step = "leave it out; series rebase --onto drops it from the series"
                raise ToolError(what, where=name, next_step=step)
            message = message_for(self.patches[name], self.person, self.trailers)
            who = identity(git.log(commit, "%aI"), *self.person)
            words = ("commit", "--quiet", "--cleanup=verbatim", "-F", "-")
            git.run(*words, stdin=message.encode(), env=who)
        return None


def submit(project: Project, asked: argparse.Namespace) -> tuple[Base, list[Branch]]:
    """Make the branches and write the texts, all of them or none."""
    out = project.build / "submit"
    series = read_series(project.series_file)
    chosen = choose_patches(series, asked.patches)
    _refuse_words(asked.topic, asked.trailer)
    if problems := check_needs(series):
        raise Problems("the series breaks its rules", problems)
    apply_series(project, series)
    base = find_base(project, asked.onto, asked.clone)
    person = find_person(asked.clone or project.root)
    if asked.test and base.git.tree_id(base.commit) != project.pin.tree:
        raise ToolError(
            "tests run only on the pinned release: the installed kernels are of it",
            where="--test",
            expected=f"the files of vLLM {project.pin.version}",
            found=base.label,
            next_step="leave --test out, and run the test plan in the clone",
        )
    known = {patch.name: patch for patch in series}
    order = list(known)
    commits = Git(project.tree).commits(f"{BASE_REF}..{APPLIED_REF}")
    groups = {p.name.removesuffix(".patch"): [p] for p in chosen}
    if asked.topic:
        groups = {asked.topic: chosen}
    with _workshop(project, base) as git:
        by_name = dict(zip(order, commits, strict=True))
        maker = Maker(git, base, known, by_name, person, asked.trailer)
        drafts: list[Branch] = []
        texts: dict[Path, bytes | None] = {}
        for name, patches in groups.items():
            mine = [patch.name for patch in patches]
            inside, head = maker.stack(mine)
            below = tuple(n for n in inside if n not in mine)
            tell(f"{name}: {count_commits(len(inside))} on {base.label}")
            old = base.git.commit_id(f"refs/heads/{name}")
            if old not in (None, head) and not asked.replace:
                raise ToolError(
                    "a branch of this name exists; no branch was made",
                    where=f"{base.git.path}, {name}",
                    found=base.git.oneline(f"refs/heads/{name}"),
                    next_step="look at it, then: --replace; or another name: --topic",
                )
            git.run("update-ref", f"refs/heads/{name}", head)
            findings = _check(project, git, head, len(mine)) if asked.test else {}
            path = out / f"{name.replace('/', '-')}.md"
            text = render_request(git, base.commit, base.label, patches, len(below), head, findings)
            texts[path] = text.encode()
            drafts.append(Branch(name, tuple(mine), below, path, old != head))
        with replacing_all(texts):
            _publish(git, base, [b.name for b in drafts if b.fresh], asked.replace)
    return base, drafts


def _publish(git: Git, base: Base, branches: Sequence[str], replace: bool) -> None:
    """Fetch all branches into their repository in one act; nothing leaves this machine."""
    sign = "+" if replace else ""
    if refs := [f"{sign}refs/heads/{name}:refs/heads/{name}" for name in branches]:
        options = ("--quiet", "--atomic", "--no-tags", "--no-write-fetch-head")
        base.git.run("fetch", *options, git.path.resolve().as_uri(), *refs)


def _check(project: Project, git: Git, head: str, number: int) -> dict[str, Finding]:
    """Check the last commits of a branch together, with the kernels that are installed."""
    place = Place(git.text("rev-parse", f"{head}~{number}"), head)
    checker = Checker(git, find_site(Path(sys.executable)), project.build / "submit-checks")
    findings = {}
    for check in (IMPORTS, LINTERS, TESTS):
        findings[check] = found = checker.check(place, check)
        tell(f"  {check}: {found.said if found.good else f'FAILED: {found.said}'}")
    return findings
