# SPDX-License-Identifier: Apache-2.0
"""What the documents, the Makefile and the lock promise about this repository holds."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.real import PROJECT, PROJECTS
from tools.common.pin import DEFAULT_LINE

ROOT = PROJECT.root
PROSE = [
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "docs/clients.md",
    "docs/prefill_decode.md",
    "docs/repository.md",
    f"docs/{DEFAULT_LINE}.md",
    "docs/wheel.md",
    "examples/clients/README.md",
]

# Where digests of the pin may stand again: in patches (context), in dated records, in history.
RECORDS = ("patches/", "benchmarks/results/", "CHANGELOG.md")
# Sizes and versions of many packages, which may be the same digits by chance.
CLIENT_LOCKS = [
    f"clients-{name}" for name in ("megatron-core", "ms-swift", "skyrl", "verifiers", "verl")
]
# The locks of all lines but the first.
LINE_LOCKS = [project.line for project in PROJECTS if project.line != DEFAULT_LINE]
LOCKS = tuple(
    f"requirements/{name}.txt"
    for name in ("environment", "cpu", "cuda", *LINE_LOCKS, *CLIENT_LOCKS)
)


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
    """Names of the committed files, less submodules; of all files outside a git repository."""
    listing = run("git", "ls-files", "--stage", "-z")
    if listing.returncode == 0 and listing.stdout:
        entries = (entry.split("\t", 1) for entry in listing.stdout.split("\0") if entry)
        names = [name for mode, name in entries if not mode.startswith("160000")]
        return [name for name in names if (ROOT / name).is_file()]
    made = {"build", "vllm", "__pycache__"}
    return [
        str(path.relative_to(ROOT))
        for path in ROOT.rglob("*")
        if path.is_file()
        and not any(part in made or part.startswith(".") for part in path.relative_to(ROOT).parts)
    ]


def texts(names: list[str]) -> dict[str, str]:
    """Contents of those files that are text, by name."""
    found = {}
    for name in names:
        data = (ROOT / name).read_bytes()
        if b"\0" not in data:
            found[name] = data.decode("utf-8", errors="replace")
    return found


def pinned(name: str) -> dict[str, tuple[str, int]]:
    """Version and number of digests of every requirement of a lock file.

    A requirement is one logical line: name, version, then one ``--hash`` after the other.
    """
    lines = re.sub(r"\\\n\s*", "", read(name)).splitlines()
    lock: dict[str, tuple[str, int]] = {}
    for line in lines:
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        if line.startswith("-r "):
            lock |= pinned(f"requirements/{line[3:]}")
            continue
        requirement, *options = line.split()
        distribution, _, version = requirement.partition("==")
        assert all(re.fullmatch("--hash=sha256:[0-9a-f]{64}", option) for option in options), line
        lock[canonicalize_name(distribution)] = (version, len(options))
    return lock


def targets() -> list[str]:
    """Every target a person can name: not a stamp, not a pattern, not make's own."""
    return re.findall(r"^([A-Za-z0-9_][\w.-]*):(?!=)", read("Makefile"), re.MULTILINE)


# --- Makefile, README ----------------------------------------------------------------------------


def listed(*arguments: str) -> list[str]:
    return re.findall(r"^  ([\w.-]+) +\S.*$", make(*arguments).stdout, re.MULTILINE)


def test_help_all_lists_every_target_once() -> None:
    assert len(targets()) > 10
    assert sorted(listed("help-all")) == sorted(targets())


@pytest.mark.parametrize("target", targets())
def test_target_can_be_planned(target: str) -> None:
    plan = make("--dry-run", target)
    assert plan.returncode == 0, plan.stderr


@pytest.mark.parametrize("name", PROSE)
def test_make_commands_in_prose_exist(name: str) -> None:
    code = re.findall(r"```.*?```|`[^`\n]+`", read(name), re.DOTALL)
    named = {target for text in code for target in re.findall(r"\bmake ([a-z][a-z-]*)", text)}
    assert named <= set(targets())


def test_files_named_in_prose_exist() -> None:
    for name in PROSE:
        for link in re.findall(r"\]\(([^)#\s]+)", read(name)):
            if "://" not in link:
                assert (ROOT / name).parent.joinpath(link).exists(), f"{name} links {link}"


def test_documentation_is_that_of_the_series() -> None:
    page = PROJECT.tree / "docs/features/routed_experts.md"
    if not page.exists():
        pytest.skip("the patched tree is not there: make apply")
    assert read("docs/routed_experts.md") == page.read_text(encoding="utf-8")


# --- requirements/ --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["bootstrap", "cpu", "cuda", "environment", "tools", *LINE_LOCKS, *CLIENT_LOCKS]
)
def test_lock_is_complete_and_names_no_place(name: str) -> None:
    lock = pinned(f"requirements/{name}.txt")
    assert lock
    assert all(version and digests for version, digests in lock.values())
    assert "://" not in read(f"requirements/{name}.txt")


@pytest.mark.parametrize("name", ["environment", "cpu", "cuda"])
def test_lock_has_the_installer_that_installs_it(name: str) -> None:
    ((installer, (version, _)),) = pinned("requirements/bootstrap.txt").items()
    assert pinned(f"requirements/{name}.txt")[installer][0] == version


def test_images_and_tools_have_what_the_tests_run_with() -> None:
    # Else the bill of materials, and with it the wheel, could come out otherwise in the image.
    assert re.findall("^-r (.*)$", read("requirements/environment.txt"), re.MULTILINE) == [
        "cpu.txt",
        "tools.txt",
    ]


def test_lock_is_what_is_installed() -> None:
    wanted = {
        package: version for package, (version, _) in pinned("requirements/environment.txt").items()
    }
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
    lock = pinned(f"requirements/{name}.txt")
    upstream = [PROJECT.tree / f"requirements/{source}.txt" for source in sources]
    if not upstream[0].exists():
        pytest.skip(f"{PROJECT.tree} is not there: make apply")
    target = {"python_version": python, "python_full_version": f"{python}.0"}
    for source in [ROOT / f"requirements/{name}.in", *upstream]:
        for line in source.read_text(encoding="utf-8").splitlines():
            text = re.sub(r"(^|\s)#.*", "", line).strip()
            if not text or text.startswith("-r "):
                continue
            requirement = Requirement(text)
            if requirement.marker and not requirement.marker.evaluate(target):
                continue
            version, _ = lock[canonicalize_name(requirement.name)]
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
    for name, text in texts([n for n in committed() if not n.endswith(".patch")]).items():
        for word in words:
            assert word not in text, f"{name} names {word}"


def test_digests_of_the_pin_stand_in_one_file() -> None:
    def leaves(value: object) -> list[object]:
        if isinstance(value, dict):
            return [leaf for inner in value.values() for leaf in leaves(inner)]
        if isinstance(value, list):
            return [leaf for inner in value for leaf in leaves(inner)]
        return [value]

    pins = [tomllib.loads(path.read_text()) for path in ROOT.glob("patches/*/upstream.toml")]
    values = {str(leaf) for leaf in leaves(pins)}
    # A commit or a digest, a size in bytes. A version may stand in prose.
    pin = [v for v in values if re.fullmatch(r"[0-9a-f]{40,64}|\d{6,}", v)]
    assert len(pin) >= 4
    word = re.compile(rf"(?<![\w.])({'|'.join(pin)})(?!\w|\.\d)")
    for name, text in texts(committed()).items():
        if name.startswith(RECORDS) or name in LOCKS:
            continue
        found = word.search(text)
        assert not found, f"{name} repeats {found[0]} of a pin"


def test_attributes_keep_patches_byte_exact() -> None:
    if shutil.which("git") is None or run("git", "rev-parse").returncode:
        pytest.skip("not a git repository")
    answer = run(
        "git",
        "check-attr",
        "text",
        "whitespace",
        "--",
        *(f"patches/{PROJECT.line}/{name}" for name in ("any.patch", "series")),
    )
    assert answer.stdout.count(": unset") == 4, answer.stdout
