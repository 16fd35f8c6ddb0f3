# SPDX-License-Identifier: Apache-2.0
"""Patches as branches that a person can send to vLLM, and the text of each pull request.

Nothing here pushes. A branch holds the patch and, below it, those earlier patches of the series
that it cannot do without; author and sign-off are the person's.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from email.utils import parseaddr
from pathlib import Path

from tools.apply import apply_series
from tools.check_patches import IMPORTS, LINTERS, TESTS, Checker, Finding, Place
from tools.errors import ToolError
from tools.git import Git
from tools.patch import PROJECT_EMAIL, PROJECT_NAME, Patch
from tools.pin import Project
from tools.series import Series, read_series
from tools.source import BASE_REF
from tools.tree import APPLIED_REF
from tools.upstream_tests import is_test_file

_TEMPLATE = ".github/PULL_REQUEST_TEMPLATE.md"
_RULES = ("AGENTS.md", "CONTRIBUTING.md", "docs/contributing/README.md")
# Names that RFC 2606 and 6761 set aside: nobody reads mail there.
_RESERVED = re.compile(r"(.*\.)?(example(\.\w+)?|invalid|test|localhost|local)", re.IGNORECASE)
_NOBODY = {"", "root", "user", "nobody", "unknown", "your name", "you", PROJECT_NAME.lower()}
_SENDABLE = ("Pending", "Submitted")
_CHECKED = (IMPORTS, LINTERS, TESTS)

Tell = Callable[[str], None]


@dataclass(frozen=True)
class Person:
    """Who signs off and sends."""

    name: str
    email: str

    def __str__(self) -> str:
        return f"{self.name} <{self.email}>"


@dataclass(frozen=True)
class Base:
    """Where the branches start: a commit, and the repository that gets them."""

    git: Git
    commit: str
    label: str
    is_clone: bool


@dataclass(frozen=True)
class Branch:
    """One branch that was made."""

    name: str
    patches: tuple[str, ...]  # whose pull request it is
    below: tuple[str, ...]  # patches that it stands on
    commit: str
    text: Path
    fresh: bool


# --- who ----------------------------------------------------------------------------------------


def find_person(repository: Path) -> Person:
    """The identity that git would commit with in a repository; a placeholder is refused."""
    name, email = (_configured(repository, f"user.{key}") for key in ("name", "email"))
    domain = email.rpartition("@")[2]
    problem = None
    if name.lower() in _NOBODY:
        problem = f"user.name is {name!r}"
    elif email != parseaddr(f"x <{email}>")[1] or "." not in domain or _RESERVED.fullmatch(domain):
        problem = f"user.email is {email!r}"
    elif email == PROJECT_EMAIL:
        problem = f"user.email is that of the series, {email!r}"
    if problem:
        raise ToolError(
            "a sign-off is a person's: git knows no person here",
            where=repository,
            expected="the name and the address of who answers for the patch",
            found=problem,
            next_step="git config --global user.name '...'; git config --global user.email '...'",
        )
    return Person(name, email)


def _configured(repository: Path, key: str) -> str:
    """A value of the user's own configuration, which the tools read nowhere else."""
    settings = {k: v for k, v in os.environ.items() if not k.startswith("GIT_") or "CONFIG" in k}
    done = subprocess.run(
        ["git", "-C", str(repository), "config", "--get", key],
        env=settings,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout.strip()


# --- where --------------------------------------------------------------------------------------


def find_base(project: Project, onto: str | None, clone: Path | None) -> Base:
    """The pinned release in the build tree, or a ref of a clone."""
    if clone is None:
        if onto is not None:
            raise ToolError(
                "a base other than the pinned release is a ref of a clone",
                where="--onto",
                found=onto,
                next_step="name the clone: --clone <path>",
            )
        git = Git(project.tree)
        commit = git.commit_id(BASE_REF)
        assert commit is not None  # the series was applied
        return Base(git, commit, f"vLLM {project.pin.version}", is_clone=False)
    if not (clone / ".git").exists():
        raise ToolError(
            "this is not a clone of vLLM",
            where=clone,
            expected="a directory with .git",
            next_step="name the top directory of a clone: --clone <path>",
        )
    if onto is None:
        raise ToolError(
            "a clone has many commits: on which are the branches to stand?",
            where=clone,
            next_step="name one: --onto origin/main",
        )
    git = Git(clone)
    commit = None if onto.startswith("-") else git.commit_id(onto)
    if commit is None:
        raise ToolError(
            "the clone has no such ref",
            where=clone,
            found=onto,
            next_step=f"fetch it: git -C {clone} fetch origin",
        )
    return Base(git, commit, onto, is_clone=True)


# --- which --------------------------------------------------------------------------------------


def choose_patches(series: Series, names: Sequence[str]) -> list[Patch]:
    """The named patches in the order of the series, or all that wait to be sent."""
    known = {patch.name: patch for patch in series}
    wanted = [name if name.endswith(".patch") else f"{name}.patch" for name in names]
    if unknown := [name for name in wanted if name not in known]:
        raise ToolError(
            "the series has no such patch",
            expected="one of: " + ", ".join(known),
            found=", ".join(unknown),
        )
    if not wanted:
        wanted = [patch.name for patch in series if patch.status.startswith("Pending")]
    chosen = [patch for patch in series if patch.name in wanted]
    if not chosen:
        raise ToolError(
            "no patch of the series waits to be sent",
            expected="Upstream-Status: Pending",
            next_step="name one: series submit <patch>",
        )
    if kept := [p for p in chosen if not p.status.startswith(_SENDABLE)]:
        raise ToolError(
            "a patch is not for upstream",
            where=kept[0].name,
            expected=f"Upstream-Status: {' or '.join(_SENDABLE)}",
            found=kept[0].status,
            next_step="leave it out, or change its status: CONTRIBUTING.md, Editing a patch",
        )
    return chosen


_DEFINITIONS = re.compile(
    r"^\s*(?:async\s+)?(?:def|class)\s+(\w+)|^\s*self\.(\w+)\s*[:=]|^\s*(\w+)\s*:\s*[\w\"'\[]"
    r"|^ {0,4}(\w+)\s*=",
    re.MULTILINE,
)
_WORD = re.compile(rb"[A-Za-z_]\w{3,}")


def _added(patch: Patch) -> Iterator[tuple[str, str]]:
    """The added lines of each Python file, as one text."""
    for file in patch.diff:
        if file.path.endswith(".py"):
            lines = (line.value for hunk in file for line in hunk if line.is_added)
            yield file.path, "".join(lines)


def find_needs(git: Git, series: Series) -> dict[str, set[str]]:
    """The earlier patches that each patch names something of, directly or through others.

    A name counts that an earlier patch defines and the release does not know: a function, a class,
    a field, a module. A test's names count within its own file.
    """
    files = {path: e.blob for path, e in git.files(BASE_REF).items() if path.endswith(".py")}
    contents = git.contents(files.values())
    words = {path: set(_WORD.findall(contents[blob])) for path, blob in files.items()}
    everywhere = set().union(*words.values())
    defined: dict[tuple[str, str], str] = {}  # (name, test file or ""): the first patch with it
    needs: dict[str, set[str]] = {}
    for patch in series:
        mine: set[tuple[str, str]] = set()
        used: set[tuple[str, str]] = set()
        for path, text in _added(patch):
            scope = path if is_test_file(path) else ""
            known = words.get(path, set()) if scope else everywhere
            fresh = {name for match in _DEFINITIONS.findall(text) for name in match if name}
            if path not in files:
                fresh.add(Path(path).stem)
            mine |= {(n, scope) for n in fresh if len(n) > 3 and n.encode() not in known}
            said = {word.decode() for word in _WORD.findall(text.encode())}
            used |= {(word, at) for word in said for at in {scope, ""}}
        direct = {defined[key] for key in used if key in defined}
        needs[patch.name] = direct.union(*(needs[name] for name in direct))
        for key in mine:
            defined.setdefault(key, patch.name)
    return needs


# --- making branches ----------------------------------------------------------------------------


def message_for(patch: Patch, person: Person, trailers: Sequence[str]) -> str:
    """The commit message as upstream gets it: the series' own headers go, the person signs."""
    kept: list[str] = []
    signed: list[str] = []
    for line in patch.body.strip().splitlines():
        if re.match(r"(Upstream-Status|Drop-when):", line) or PROJECT_EMAIL in line:
            continue
        (signed if re.match(r"[A-Z][A-Za-z-]+-by: ", line) else kept).append(line)
    body = re.sub(r"\n{3,}", "\n\n", "\n".join(kept)).strip()
    last = [*signed, *trailers, f"Signed-off-by: {person}"]
    return f"{patch.subject}\n\n{body}\n\n" + "\n".join(dict.fromkeys(last)) + "\n"


def check_trailer(trailer: str) -> str:
    if not re.fullmatch(r"[A-Z][A-Za-z]*(-[A-Za-z]+)+: \S.*", trailer):
        raise ToolError(
            "this is not a trailer of a commit message",
            where="--trailer",
            expected="Key-words: value, such as Assisted-by: a tool",
            found=trailer,
        )
    return trailer


@contextmanager
def _workshop(project: Project, base: Base) -> Iterator[Git]:
    """A repository that sees the commits of the series and of the base, gone afterwards."""
    place = Path(tempfile.mkdtemp(prefix=".submit-", dir=project.tree.parent))
    try:
        git = Git(place)
        git.init("work")
        sources = {project.tree.resolve(): Git(project.tree), base.git.path.resolve(): base.git}
        objects = [
            str((path / source.text("rev-parse", "--git-path", "objects")).resolve())
            for path, source in sources.items()
        ]
        info = place / ".git" / "objects" / "info"
        info.mkdir(exist_ok=True)
        (info / "alternates").write_text("".join(f"{path}\n" for path in objects))
        shallow = base.git.path / base.git.text("rev-parse", "--git-path", "shallow")
        if shallow.is_file():
            shutil.copy(shallow, place / ".git" / "shallow")
        git.run("checkout", "--quiet", "--detach", base.commit)
        yield git
    finally:
        shutil.rmtree(place, ignore_errors=True)


class Maker:
    """Makes the commits of branches in a workshop."""

    def __init__(
        self,
        git: Git,
        base: Base,
        series: Series,
        commits: dict[str, str],
        person: Person,
        trailers: Sequence[str],
    ) -> None:
        self.git = git
        self.base = base
        self.patches = {patch.name: patch for patch in series}
        self.commits = commits
        self.person = person
        self.trailers = trailers

    def stack(self, names: Sequence[str], needed: set[str]) -> tuple[list[str], str]:
        """The patches with what they need below them, on the base; their names and last commit.

        Where one does not fit, the earlier patches that touch the same files are needed too.
        """
        order = list(self.patches)
        inside = {*names, *needed}
        while True:
            failed = self._try(sorted(inside, key=order.index))
            if failed is None:
                head = self.git.commit_id("HEAD")
                assert head is not None
                return sorted(inside, key=order.index), head
            name, files = failed
            more = {
                other
                for other in order[: order.index(name)]
                if other not in inside and files & {f.path for f in self.patches[other].diff}
            }
            if not more:
                raise ToolError(
                    f"a patch does not fit {self.base.label}; no branch was made",
                    where=name,
                    found=f"conflicts in {', '.join(sorted(files))}",
                    next_step="move the series there first: series rebase --onto <version>, or "
                    "choose a base nearer to the pin",
                )
            inside |= more

    def _try(self, names: Sequence[str]) -> tuple[str, set[str]] | None:
        """Commit these patches on the base; the first that conflicts, and the files."""
        git = self.git
        git.run("reset", "--quiet", "--hard", self.base.commit)
        for name in names:
            commit = self.commits[name]
            done = git.run("cherry-pick", "--no-commit", commit, accept=(0, 1))
            if done.returncode:
                files = set(git.text("diff", "--name-only", "--diff-filter=U").splitlines())
                git.run("reset", "--quiet", "--hard")
                return name, files
            if not git.run("diff", "--cached", "--quiet", "HEAD", accept=(0, 1)).returncode:
                raise ToolError(
                    f"{self.base.label} contains a patch already; no branch was made",
                    where=name,
                    next_step="leave it out; series rebase --onto drops it from the series",
                )
            date = git.text("log", "-1", "--format=%aI", commit)
            who = {
                f"GIT_{role}_{key}": value
                for role in ("AUTHOR", "COMMITTER")
                for key, value in (
                    ("NAME", self.person.name),
                    ("EMAIL", self.person.email),
                    ("DATE", date),
                )
            }
            message = message_for(self.patches[name], self.person, self.trailers)
            git.run(
                "commit",
                "--quiet",
                "--cleanup=verbatim",
                "-F",
                "-",
                stdin=message.encode(),
                env=who,
            )
        return None


def submit(
    project: Project,
    names: Sequence[str],
    *,
    onto: str | None,
    clone: Path | None,
    topic: str | None,
    out: Path,
    after: Sequence[str] = (),
    trailers: Sequence[str] = (),
    replace: bool = False,
    site: Path | None = None,
    tell: Tell = lambda line: None,
) -> list[Branch]:
    """Make the branches and write the texts, all of them or none.

    ``site`` is where the wheel of the series is installed, if the patches are to be checked.
    """
    series = read_series(project.series_file)
    chosen = choose_patches(series, names)
    extra = {patch.name for patch in choose_patches(series, after)} if after else set()
    if topic is not None and not re.fullmatch(r"[a-z0-9][a-z0-9._/-]*", topic):
        raise ToolError(
            "this is no name for a branch",
            where="--topic",
            expected="lower-case letters, digits, . _ / -",
            found=topic,
        )
    for trailer in trailers:
        check_trailer(trailer)
    if out.exists() and not out.is_dir():
        raise ToolError("the texts need a directory", where="--out", found=f"the file {out}")
    apply_series(project, series, project.tree)
    base = find_base(project, onto, clone)
    person = find_person(clone if clone else project.root)
    if site and base.git.tree_id(base.commit) != project.pin.tree:
        raise ToolError(
            "tests run only on the pinned release: the installed kernels are of it",
            where="--test",
            expected=f"the files of vLLM {project.pin.version}",
            found=base.label,
            next_step="leave --test out, and run the test plan in the clone",
        )
    tree = Git(project.tree)
    listing = [patch.name for patch in series]
    commits = dict(zip(listing, tree.commits(f"{BASE_REF}..{APPLIED_REF}"), strict=True))
    needs = find_needs(tree, series)
    groups = {topic: chosen} if topic else {p.name.removesuffix(".patch"): [p] for p in chosen}
    with _workshop(project, base) as git:
        maker = Maker(git, base, series, commits, person, trailers)
        drafts, texts = [], {}
        for name, patches in groups.items():
            mine = [patch.name for patch in patches]
            last = max(map(listing.index, mine))
            earlier = {n for n in extra if listing.index(n) < last}
            needed = earlier.union(*(needs[n] for n in (*mine, *earlier)))
            inside, head = maker.stack(mine, needed)
            below = tuple(n for n in inside if n not in mine)
            tell(f"{name}: {_commits(len(inside))} on {base.label}")
            old = base.git.commit_id(f"refs/heads/{name}")
            if old not in (None, head) and not replace:
                raise ToolError(
                    "a branch of this name exists; no branch was made",
                    where=f"{base.git.path}, {name}",
                    found=base.git.oneline(f"refs/heads/{name}"),
                    next_step="look at it, then: --replace; or another name: --topic",
                )
            git.run("update-ref", f"refs/heads/{name}", head)
            findings = _check(project, git, head, len(mine), site, tell) if site else {}
            text = render_request(git, base, patches, below, head, findings)
            path = out / f"{name.replace('/', '-')}.md"
            texts[path] = text
            drafts.append(Branch(name, tuple(mine), below, head, path, old != head))
        with _written(texts):
            _publish(git, base, [b for b in drafts if b.fresh], replace)
    return drafts


@contextmanager
def _written(texts: dict[Path, str]) -> Iterator[None]:
    """Write the files beside their places; they take their names when the body succeeded."""
    partial = {path.with_name(f".{path.name}.partial"): path for path in texts}
    try:
        for place, path in partial.items():
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_text(texts[path], encoding="utf-8")
        yield
        for place, path in partial.items():
            place.replace(path)
    finally:
        for place in partial:
            place.unlink(missing_ok=True)


def _publish(git: Git, base: Base, branches: Sequence[Branch], replace: bool) -> None:
    """Hand all branches to their repository in one act; nothing leaves this machine."""
    if not branches:
        return
    sign = "+" if replace else ""
    refs = [f"{sign}refs/heads/{b.name}:refs/heads/{b.name}" for b in branches]
    base.git.run(
        "fetch", "--quiet", "--atomic", "--no-tags", "--no-write-fetch-head",
        git.path.resolve().as_uri(), *refs,
    )  # fmt: skip


def _check(
    project: Project, git: Git, head: str, number: int, site: Path, tell: Tell
) -> dict[str, Finding]:
    """Check the last commits of a branch together, with the kernels that are installed."""
    before = git.text("rev-parse", f"{head}~{number}")
    subject = git.text("log", "-1", "--format=%s", head)
    place = Place(head, before, subject, git.tree_id(head), tuple(git.changes(before, head)))
    checker = Checker(git, site, project.root / "build" / "submit-checks")
    findings = {}
    for check in _CHECKED:
        findings[check] = found = checker.check(place, check)
        tell(f"  {check}: {found.said if found.good else f'FAILED: {found.said}'}")
    return findings


# --- the text -----------------------------------------------------------------------------------


def render_request(
    git: Git,
    base: Base,
    patches: Sequence[Patch],
    below: Sequence[str],
    head: str,
    findings: dict[str, Finding],
) -> str:
    """The pull request's text, after the template that the base has."""
    files = [c.path for c in git.changes(f"{head}~{len(patches)}", head) if c.status != "D"]
    tests = [file for file in files if is_test_file(file)]
    purpose: list[str] = []
    tested: list[str] = []
    for patch in patches:
        why, how = _parts(patch)
        purpose += [f"### {patch.subject}", ""] if len(patches) > 1 else []
        purpose += [why, ""]
        tested += [how, ""] if how else []
    if below:
        last = "commit" if len(patches) == 1 else f"{len(patches)} commits"
        purpose += [
            f"**Stacked.** This branch stands on {_commits(len(below))} of other pull requests, to "
            f"be reviewed first; this one is about the last {last}. Below it:",
            "",
            *(
                f"- {git.text('log', '-1', '--format=%s', c)}"
                for c in _below(git, base, head, below)
            ),
            "",
        ]
    commands = [f".venv/bin/python -m pytest {file} -v" for file in tests]
    commands.append(f"pre-commit run --files {' '.join(files)}")
    plan = ["```bash", *commands, "```", "", *tested]
    result = _results(findings, base)
    keywords = re.sub(r"^(\[[^\]]*\])+\s*", "", patches[0].subject)
    ask = [
        "- Not a duplicate because: ... (what `gh issue view` and `gh pr list --repo "
        f'vllm-project/vllm --state open --search "{keywords}"` found)',
        "- AI assistance: ... (which, for what; every changed line was read by: ...)",
    ]
    title = patches[0].subject if len(patches) == 1 else f"{patches[0].subject} (and more)"
    lines = [
        f"<!-- A draft on {base.label}. Nothing was sent: read every line, fill in the dots, then",
        "     send it yourself. Remove this comment. -->",
        "",
        f"Title: {title}",
        "",
        "## Purpose",
        "",
        *purpose,
        "## Test Plan",
        "",
        *plan,
        "## Test Result",
        "",
        *result,
        "",
        "## Statements",
        "",
        *ask,
        "",
        "---",
        _checklist(git, base),
    ]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).rstrip() + "\n"


def _commits(number: int) -> str:
    return "1 commit" if number == 1 else f"{number} commits"


def _below(git: Git, base: Base, head: str, below: Sequence[str]) -> list[str]:
    return git.commits(f"{base.commit}..{head}")[: len(below)]


def _parts(patch: Patch) -> tuple[str, str]:
    """Why the patch is, and how it was tested, out of its message."""
    why: list[str] = []
    how: list[str] = []
    for paragraph in re.split(r"\n\s*\n", patch.body.strip()):
        lines = [
            line
            for line in paragraph.splitlines()
            if not re.match(r"(Upstream-Status|Drop-when):|[A-Z][A-Za-z-]+-by: ", line)
        ]
        text = "\n".join(lines).strip()
        if text:
            (how if re.match(r"Tests?(ed)?:", text) else why).append(text)
    return "\n\n".join(why), "\n\n".join(how)


def _results(findings: dict[str, Finding], base: Base) -> list[str]:
    if not findings:
        return [
            f"... (not run on this branch yet: run the plan on {base.label}, put the output here)"
        ]
    lines = [f"On {base.label}, on a CPU:", "", "| Check | Result |", "| --- | --- |"]
    for check, found in findings.items():
        said = found.said if found.good else f"**failed**: {found.said}"
        lines.append(f"| {check} | {said} |")
    for check, found in findings.items():
        if not found.good:
            lines += ["", f"{check}:", "", "```text", found.details, "```"]
    return lines


def _checklist(git: Git, base: Base) -> str:
    """Upstream's own checklist, unticked: ticking it is the person's."""
    files = git.files(base.commit, _TEMPLATE)
    if _TEMPLATE not in files:
        return "(the base has no template for pull requests)"
    blob = files[_TEMPLATE].blob
    text = git.contents([blob])[blob].decode(errors="replace")
    match = re.search(r"<details>.*</details>", text, re.DOTALL)
    return match[0] if match else text


def rules(base: Base) -> list[str]:
    """Upstream's documents about contributing, as the base has them."""
    return [name for name in _RULES if name in base.git.files(base.commit, name)]
