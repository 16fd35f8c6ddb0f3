# SPDX-License-Identifier: Apache-2.0
"""What the documents, the Makefile and the lock promise about this repository holds."""

import ast
import os
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from harness.lines import LINES
from tests.real import PROJECT, PROJECTS
from tools.common.pin import Project

ROOT = PROJECT.root
PROSE = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("examples/clients/*.md")]


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def run(*command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, cwd=ROOT, env=os.environ | environment, capture_output=True, text=True
    )


def make(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run make as a person would, not as a child of the make that runs these tests."""
    return run("make", *arguments, MAKEFLAGS="", MAKELEVEL="0")


def committed() -> list[str]:
    """Names of the committed files, without submodules."""
    listing = run("git", "ls-files", "-z")
    if listing.returncode:
        pytest.skip("not a git repository")
    return [name for name in listing.stdout.split("\0") if (ROOT / name).is_file()]


def pinned(name: str) -> dict[str, str]:
    """The version of every requirement of a lock file. `pip` and `uv` check its digests."""
    lock: dict[str, str] = {}
    for included in re.findall(r"^-r (\S+)", read(name), re.MULTILINE):
        lock |= pinned(os.path.normpath(Path(name).parent / included))
    for distribution, version in re.findall(r"^([\w.-]+)==(\S+)", read(name), re.MULTILINE):
        lock[canonicalize_name(distribution)] = version
    return lock


def targets() -> list[str]:
    """Every target a person can name: not a stamp, not a pattern, not make's own."""
    return re.findall(r"^([A-Za-z0-9_][\w.-]*):(?!=)", read("Makefile"), re.MULTILINE)


# --- Makefile, README ----------------------------------------------------------------------------


def test_help_all_lists_every_target_once() -> None:
    listed = re.findall(r"^  ([\w.-]+) +\S.*$", make("help-all").stdout, re.MULTILINE)
    assert len(targets()) > 10
    assert sorted(listed) == sorted(targets())


@pytest.mark.parametrize("target", targets())
def test_target_can_be_planned(target: str) -> None:
    plan = make("--dry-run", target)
    assert plan.returncode == 0, plan.stderr


@pytest.mark.parametrize("page", PROSE, ids=lambda page: page.name)
def test_make_commands_in_prose_exist(page: Path) -> None:
    code = re.findall(r"```.*?```|`[^`\n]+`", page.read_text(encoding="utf-8"), re.DOTALL)
    named = {target for text in code for target in re.findall(r"\bmake ([a-z][a-z-]*)", text)}
    assert named <= set(targets())


@pytest.mark.parametrize("project", PROJECTS, ids=lambda project: project.line)
def test_the_submodule_is_at_the_pinned_commit(project: Project) -> None:
    if "\nsubmodule = " not in project.pin_file.read_text():
        pytest.skip("this line has the archive alone")
    staged = run("git", "ls-files", "--stage", "vllm").stdout
    if not staged:
        pytest.skip("this is no git repository")
    mode, commit, *_ = staged.split()
    assert mode == "160000"
    assert commit.startswith(project.pin.commit)


def test_documentation_is_that_of_the_series() -> None:
    page = PROJECT.tree / LINES[PROJECT.line].page
    if not page.exists():
        pytest.skip("the patched tree is not there: make apply")
    assert read(f"patches/{PROJECT.line}/routed_experts.md") == page.read_text(encoding="utf-8")


PROGRAMS = ("benchmarks", "checks", "demos", "examples", "gpu", "harness", "tools")


def room(name: str) -> str:
    """The package that the diagram draws for a module: of `tools`, the one below."""
    top, _, rest = name.partition(".")
    return rest.partition(".")[0] if top == "tools" and rest else top


def imports(name: str) -> set[tuple[str, str]]:
    """Who imports whom in a committed file."""
    module = name.removesuffix(".py").replace("/", ".")
    found: set[str] = set()
    for node in ast.walk(ast.parse(read(name))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
    ours = {other for other in found if other.partition(".")[0] in (*PROGRAMS, "tests")}
    pairs = set()
    for other in ours:
        is_within = module.startswith("tools.") and other.startswith("tools.")
        target = room(other) if is_within else other.partition(".")[0]
        pairs.add((room(module), target))
    return {(source, target) for source, target in pairs if source != target}


def test_the_diagram_shows_who_imports_whom() -> None:
    names = [name for name in committed() if name.endswith(".py") and "/" in name]
    files = [name for name in names if name.startswith(tuple(f"{p}/" for p in PROGRAMS))]
    found = {pair for name in files for pair in imports(name)}
    drawn = set(re.findall(r"^ +(\w+) --> (\w+)$", read("docs/repository.md"), re.MULTILINE))
    assert drawn == {(a, b) for a, b in found if b != "common" and a != "tools"}


# --- requirements/ --------------------------------------------------------------------------------


LOCKS = sorted(str(p.relative_to(ROOT)) for p in ROOT.glob("requirements/**/*.txt"))


@pytest.mark.parametrize("name", LOCKS)
def test_lock_names_no_place(name: str) -> None:
    assert "://" not in read(name)


@pytest.mark.parametrize("name", [name for name in LOCKS if name.count("/") == 2])
def test_lock_has_the_installer_that_installs_it(name: str) -> None:
    ((installer, version),) = pinned("requirements/bootstrap.txt").items()
    assert pinned(name)[installer] == version


def test_lock_is_what_is_installed() -> None:
    wanted = pinned(f"requirements/{PROJECT.line}/environment.txt")
    installed: dict[str, str] = {}
    for distribution in metadata.distributions():
        # The first on the path counts: setuptools appends what it carries itself.
        installed.setdefault(canonicalize_name(distribution.name), distribution.version)
    assert {package: installed.get(package) for package in wanted} == wanted


@pytest.mark.parametrize(
    ("name", "python", "sources"),
    [
        ("environment", "3.11", ["common"]),
        ("cpu", "3.11", ["common"]),
        ("cuda", "3.12", ["common", "cuda"]),
    ],
)
def test_lock_meets_its_input_and_vllm(name: str, python: str, sources: list[str]) -> None:
    folder = f"requirements/{PROJECT.line}"
    lock = pinned(f"{folder}/{name}.txt")
    overrides = ROOT / folder / "overrides.in"
    may_be_older = overrides.read_text() if overrides.exists() else ""
    upstream = [PROJECT.tree / f"requirements/{source}.txt" for source in sources]
    if not upstream[0].exists():
        pytest.skip(f"{PROJECT.tree} is not there: make apply")
    target = {"python_version": python, "python_full_version": f"{python}.0"}
    for source in [ROOT / f"{folder}/{name}.in", *upstream]:
        for line in source.read_text(encoding="utf-8").splitlines():
            text = re.sub(r"(^|\s)#.*", "", line).strip()
            if not text or text.startswith("-r "):
                continue
            requirement = Requirement(text)
            if requirement.marker and not requirement.marker.evaluate(target):
                continue
            if requirement.name in may_be_older.split():
                continue
            version = lock[canonicalize_name(requirement.name)]
            assert requirement.specifier.contains(version, prereleases=True), text


# --- what is committed ----------------------------------------------------------------------------


def registries() -> list[str]:
    """Host names of the package registries this machine knows, from their own clients."""
    # Not in this process: pip would change which distutils later tests import.
    said = (
        "from pip._internal.models.index import PyPI as p; print(p.netloc, p.file_storage_domain)"
    )
    done = run(sys.executable, "-c", said)
    if done.returncode:
        pytest.skip(f"pip cannot say which index it knows: {done.stderr[-200:]}")
    hosts = set(done.stdout.split())
    for source in [*Path("/etc/apt").glob("sources.list*"), *Path("/etc/apt").glob("*/*.sources")]:
        if source.is_file():
            hosts |= set(re.findall(r"https?://([^/\s:]+)", source.read_text(errors="replace")))
    return sorted(host for host in hosts if "." in host)


def test_no_committed_file_names_a_registry_or_a_place_on_this_machine() -> None:
    home = str(Path.home())
    words = [*registries(), f"{ROOT}/", *[f"{home}/"] * (home not in ("/", "/tmp"))]
    for name in committed():
        text = "" if name.endswith(".patch") else (ROOT / name).read_text(errors="replace")
        for word in words:
            assert word not in text, f"{name} names {word}"
