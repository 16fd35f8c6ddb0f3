# SPDX-License-Identifier: Apache-2.0
"""Every patch at its own place in the series, as a pull request that stops there would be."""

import argparse
import json
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tools.common.cli import ToolError, add_flag, add_path, table, tell
from tools.common.files import digest_of, write
from tools.common.git import Git
from tools.common.pin import Project
from tools.series.series import choose, fingerprint, read_series, with_needs
from tools.series.tree import BASE_REF, open_tree
from tools.upstream import testrun
from tools.upstream.hubcache import recipe
from tools.upstream.testrun import FAILED, LIMIT_S, PASSED, SKIPPED, Results
from tools.wheel.verify import SITE, verify_installed

PACKAGE = "vllm"
# What every patch must leave importable, beside the modules that it touches.
MODULES = (
    *("vllm", "vllm.entrypoints.cli.main", "vllm.entrypoints.openai.api_server"),
    *("vllm.v1.engine.core", "vllm.v1.worker.cpu_worker"),
)
_IMPORT = """
import importlib, pathlib, sys
for name in sys.argv[1:]:
    try:
        module = importlib.import_module(name)
    except ImportError as error:
        # Some modules raise an error of their own from the one that names the package.
        missing = getattr(error.__cause__ or error, "name", None) or "vllm"
        if missing.partition(".")[0] == "vllm":
            raise
        continue
    file = pathlib.Path(module.__file__).resolve()
    if not file.is_relative_to(pathlib.Path.cwd()):
        sys.exit(f"{name} was imported from {file}")
"""
# Programs of the environment, then vLLM's own hooks; all take file names.
RUFF = (("ruff", "check", "--no-cache"), ("ruff", "format", "--check", "--no-cache"))
MARKDOWN = ("rumdl", "check", "--no-cache")
# The linter finds its configuration at the top of the tree by itself, newer releases' not.
MARKDOWN_CONFIG = "tools/pre_commit/.markdownlint.yaml"
HOOK_FOLDER = "tools/pre_commit"
HOOKS = (
    *("check_spdx_header", "check_forbidden_imports", "check_torch_cuda", "validate_config"),
    *("check_boolean_context_manager", "check_init_lazy_imports"),
)
# As vLLM's hook: what it leaves out, and the lowest version of Python that it supports, which is
# in vLLM's configuration. Without packages, as there, so that torch's own types do not count.
MYPY = ("mypy", "--no-site-packages", "--no-error-summary", "--python-version")
MYPY_VERSION = re.compile(r'mypy\.py .*"(3\.\d+)"')
_GROUPS = """
import json, runpy, sys
hook = runpy.run_path("tools/pre_commit/mypy.py")
names = [name for name in sys.argv[1:] if name.endswith((".py", ".pyi"))]
print(json.dumps(hook["group_files"](names)))
"""
IMPORTS, LINTERS, TYPES, TESTS = CHECKS = ("imports", "linters", "types", "tests")
CANNOT_RUN, FAILED_BEFORE = "cannot run here", "fail on the release too"
_ABOUT = """\
Imports: the modules that the patch changes, and the server's. Linters: vLLM's own rules and \
hooks (SPDX headers among them) pass on the files that it changes. Types: mypy finds nothing that \
it does not find before the patch. Tests: the tests that the patch changes. A test that fails in \
the same way on the release does not count."""


def declare(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("patches", nargs="*", metavar="PATCH", help="only these (default: all)")
    add_flag(parser, "--alone", "each on the release, above what its Needs: names only")
    add_path(parser, "--out", "where the table goes, as Markdown")


def run(arguments: argparse.Namespace, project: Project) -> None:
    """Check every patch at its own place. vLLM can be imported. Its linters pass on the changed
    files. mypy finds no new errors. The changed tests pass, or fail in the same way on the release.
    A finished check is not repeated, so you can go on after an interruption. The wheel of the
    series must be installed."""
    series, checker = read_series(project.series_file), open_checker(project, "check-patches")
    applied = checker.git.commits(f"{BASE_REF}..HEAD")
    commits = dict(zip((patch.name for patch in series), applied, strict=True))
    rows, failed = list[list[str]](), list[str]()
    for name in [patch.name for patch in choose(series, arguments.patches) or series]:
        commit, row = commits[name], [f"`{name}`"]
        if arguments.alone:
            needs = with_needs(series, [name])
            commit = checker.stand_alone(name, [commits[need] for need in needs])
        for check in CHECKS:
            found = checker.check(commit, check)
            tell(f"{name:36}  {check:8}  {found}")
            row.append(str(found))
            if not found.good:
                failed += [f"{name}, {check}: {found.said}", *found.details.splitlines()]
        rows.append(row)
    if arguments.alone:
        title, command = "alone", "make check-patches ARGS=--alone"
        place = "on the release, above what its `Needs:` names"
    else:
        title, command = "at its own place", "make check-patches"
        place = "with all earlier patches and no later ones"
    if arguments.out:
        about = (
            f"# Every patch {title}\n\n"
            f"{len(rows)} patches on vLLM {project.pin.version}, each {place}, on a CPU. {_ABOUT} "
            f"`{command}` writes this file.\n\n"
            f"series: {fingerprint(series, project.pin)[:16]}\n"
        )
        lines = [about, *table(["Patch", *map(str.capitalize, CHECKS)], rows)]
        write(arguments.out, "\n".join(lines) + "\n")
    if failed:
        step = "correct the patch (CONTRIBUTING.md, Editing a patch)"
        raise ToolError("checks failed", arguments.out, next_step=step, details=failed)
    print(f"series: {len(rows)} patches pass {title}")


class Finding(NamedTuple):
    """Result of one check of one patch."""

    good: bool
    said: str  # in a word or two
    details: str = ""

    def __str__(self) -> str:
        return self.said if self.good else f"**{self.said}**"


class Checker:
    """Checks patches of the series in ``git`` in one work tree that goes from place to place.

    Kernels and generated files come from ``site``, where the wheel is installed. What is made goes
    to ``build``: a finished check of the same trees is not made again.
    """

    def __init__(self, git: Git, site: Path, build: Path) -> None:
        self.git, self.build = git, build.resolve()
        self.tree, self.results = self.build / PACKAGE, self.build / "results"
        # The package beside the tests comes before the installed one, also in what they start.
        self.environment = testrun.test_environment(self.build, PYTHONPATH=str(self.tree))
        shutil.rmtree(self.tree, ignore_errors=True)
        git.run("worktree", "prune")
        git.run("worktree", "add", "--quiet", "--detach", str(self.tree), BASE_REF)
        # What a wheel has beyond the sources: kernels, generated modules.
        sources = git.files("HEAD", PACKAGE)
        for file in (site / PACKAGE).rglob("*"):
            name = file.relative_to(site).as_posix()
            if file.is_file() and name not in sources and "__pycache__" not in file.parts:
                (self.tree / name).parent.mkdir(parents=True, exist_ok=True)
                (self.tree / name).symlink_to(file.resolve())

    def check(self, commit: str, name: str) -> Finding:
        """One check of the patch that a commit is of, or what an earlier run found."""
        make = {
            IMPORTS: self._check_imports,
            LINTERS: self._check_linters,
            TYPES: self._check_types,
            TESTS: self._check_tests,
        }[name]
        trees = (self.git.tree_id(at)[:12] for at in (BASE_REF, f"{commit}^", commit))
        return Finding(*self._kept("-".join([*trees, name]), make, commit))

    def _files(self, commit: str, kind: str) -> list[str]:
        """Files of this kind that the patch adds or changes."""
        return self.git.changed("--diff-filter=d", f"{commit}^", commit, "--", kind)

    def stand_alone(self, name: str, stack: Sequence[str]) -> str:
        """The commit of a patch on the release, above only what it needs; ``stack`` has the
        commits of these in the series, and the patch's own last."""
        self._go_to(BASE_REF)
        git = Git(self.tree)
        if git.run("cherry-pick", *stack, accept=(0, 1)).returncode:
            found = "conflicts in " + ", ".join(git.changed("--diff-filter=U"))
            git.run("cherry-pick", "--abort")
            what = "a patch does not apply to the release with what it needs"
            raise ToolError(what, name, found=found, next_step="correct its Needs:")
        return git.text("rev-parse", "HEAD")

    def _kept(self, name: str, make: Callable[..., Any], *arguments: object) -> Any:
        """The result that an earlier run stored under this name, or a new one."""
        how = f"{digest_of(Path(__file__))[:8]}-{recipe()[:8]}"
        stored = self.results / f"{name}-{how}.json"
        if not stored.is_file():
            write(stored, json.dumps(make(*arguments), indent=1))
        return json.loads(stored.read_text())

    def _go_to(self, commit: str) -> None:
        # By force: some hooks fix what they find.
        Git(self.tree).run("checkout", "--quiet", "--force", "--detach", commit)

    def _run(self, *command: str) -> tuple[int, str]:
        """Exit status and output of a command."""
        place: dict[str, Any] = {"cwd": self.tree, "env": self.environment, "timeout": LIMIT_S}
        done = subprocess.run(command, **place, input="", capture_output=True, text=True)
        return done.returncode, done.stdout + done.stderr

    def _check_imports(self, commit: str) -> Finding:
        self._go_to(commit)
        touched = self._files(commit, f"{PACKAGE}/*.py")
        names = (re.sub(r"(/__init__)?\.py$", "", file).replace("/", ".") for file in touched)
        modules = dict.fromkeys([*MODULES, *names])
        status, said = self._run(sys.executable, "-c", _IMPORT, *modules)
        return Finding(status == 0, f"{len(modules)} modules", _tail(said) if status else "")

    def _check_linters(self, commit: str) -> Finding:
        self._go_to(commit)
        python, markdown = self._files(commit, "*.py"), self._files(commit, "*.md")
        config = ("--config", MARKDOWN_CONFIG) if (self.tree / MARKDOWN_CONFIG).exists() else ()
        commands = {
            **{" ".join(words[:2]): (words, python) for words in RUFF},
            **{hook: ((sys.executable, f"{HOOK_FOLDER}/{hook}.py"), python) for hook in HOOKS},
            " ".join(MARKDOWN[:2]): ((*MARKDOWN, *config), markdown),
        }
        wanted = {name: [*words, *files] for name, (words, files) in commands.items() if files}
        done = {name: self._run(*command) for name, command in wanted.items()}
        failed = {name: _tail(said) for name, (status, said) in done.items() if status}
        self._go_to(commit)
        details = "\n".join(f"{name}:\n{said}" for name, said in failed.items())
        said = ", ".join(failed) or f"{len(python) + len(markdown)} files"
        return Finding(not failed, said, details)

    def _check_types(self, commit: str) -> Finding:
        before, after = (
            self._kept(f"{self.git.tree_id(at)[:12]}-mypy", self._mypy, at)
            for at in (f"{commit}^", commit)
        )
        # mypy tells of missing stubs once, at whichever file it comes to first.
        new = (Counter(after) - Counter(before)).elements()
        fresh = sorted(error for error in new if not error.endswith("[import-untyped]"))
        return Finding(not fresh, f"{len(fresh)} errors" if fresh else "no error", "\n".join(fresh))

    def _mypy(self, commit: str) -> list[str]:
        """The errors that mypy finds in the package and its tests, without line numbers."""
        self._go_to(commit)
        # vLLM's own hook tells which files are checked together.
        files = self.git.files(commit, PACKAGE, "tests")
        status, groups = self._run(sys.executable, "-c", _GROUPS, *files)
        if status:
            raise ToolError("vLLM's mypy hook does not tell its files", details=[groups])
        config = self.tree / ".pre-commit-config.yaml"
        lowest = MYPY_VERSION.search(config.read_text() if config.exists() else "")
        mypy, said = (*MYPY, lowest[1] if lowest else "3.10"), []
        for name, names in json.loads(groups).items():
            if not names:
                continue
            (self.build / "mypy-files").write_text("\n".join(names))
            follow = ("--follow-imports", "skip") if name else ()
            place = ("--cache-dir", str(self.build / "mypy"), f"@{self.build / 'mypy-files'}")
            status, out = self._run(*mypy, *follow, *place)
            if status not in (0, 1):
                raise ToolError("mypy did not run", where=commit, details=out.splitlines())
            said += re.findall(r"^(.+?):\d+(: error: .*)$", out, re.MULTILINE)
        return sorted("".join(pair) for pair in said)

    def _check_tests(self, commit: str) -> Finding:
        files = self._files(commit, ":(glob)**/test_*.py")
        if not files:
            return Finding(True, "none touched")
        there = self.git.files(BASE_REF, "tests")
        counts, details = Counter[str](), []
        for file in files:
            outcomes = self.run_tests(commit, file)
            before: Results = {}
            if file in there and any(o.bad and not o.cannot_run for o in outcomes.values()):
                before = self.run_tests(BASE_REF, file)
            for test, outcome in outcomes.items():
                if outcome.status == SKIPPED or outcome.cannot_run:
                    kind = CANNOT_RUN
                elif not outcome.bad:
                    kind = PASSED
                elif outcome.is_like(before.get(test)):
                    kind = FAILED_BEFORE
                else:
                    kind = FAILED
                    details.append(f"{test}: {outcome.reason}")
                counts[kind] += 1
        kinds = (PASSED, CANNOT_RUN, FAILED_BEFORE, FAILED)
        said = [f"{counts[kind]} {kind}" for kind in kinds if counts[kind] or kind == PASSED]
        return Finding(not details, ", ".join(said), "\n".join(details))

    def run_tests(self, commit: str, file: str) -> Results:
        """The results of one test file, made now or left by an earlier run."""
        key = f"{self.git.tree_id(commit)[:12]}-{recipe()[:8]}"
        results = self.results / key / Path(file).with_suffix(".xml")
        if not results.is_file():
            self._go_to(commit)
        return testrun.run_file(file, self.tree, self.environment, results)


def open_checker(project: Project, folder: str) -> "Checker":
    """A checker of the build tree, for which the wheel of the series must be installed."""
    verify_installed(project, SITE)
    return Checker(open_tree(project), SITE, project.build / folder)


def _tail(text: str) -> str:
    return "\n".join(text.strip().splitlines()[-12:])
