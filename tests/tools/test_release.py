# SPDX-License-Identifier: Apache-2.0
"""`make release` on a toy: what is written, the same bytes every time, and what is refused."""

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from tests.tools.toy import ARM_TAG, NAMES, TAG, VERSION, Toy, digest_of, git

ROOT = Path(__file__).resolve().parents[2]
SECTION = "## re.3, 2030-02-01\n\n### Added\n\n- Rows.\n\n"
CHANGELOG = f"# Changelog\n\nAbout this file.\n\n{SECTION}## re.2, 2024-01-01\n\n- The beginning.\n"


def commit(toy: Toy, message: str = "Work") -> str:
    """Commit everything in the project's own repository."""
    git(toy.root, "add", "--all")
    identity = ["-c", "user.name=person", "-c", "user.email=person@place"]
    git(toy.root, *identity, "commit", "--quiet", "--allow-empty", "-m", message)
    return git(toy.root, "rev-parse", "HEAD")


def make_repository(toy: Toy) -> Toy:
    """The project with the Makefile and a changelog, in a commit: release 3 is prepared."""
    (toy.root / ".gitignore").write_text("/build/\n")
    (toy.root / "CHANGELOG.md").write_text(CHANGELOG)
    shutil.copy(ROOT / "Makefile", toy.root)
    git(toy.root, "init", "--quiet")
    commit(toy)
    return toy


def make_release(toy: Toy) -> subprocess.CompletedProcess[str]:
    """`make release`, with the tools of this environment."""
    tools = ["env", f"PYTHONPATH={ROOT}", sys.executable, "-m", "tools"]
    tools += ["--root", str(toy.root), "--on", toy.line]
    words = ["make", "release", f"ON={toy.line}", "TOOLS_LOCKED=Makefile"]
    return subprocess.run(
        [*words, f"TOOLS={shlex.join(tools)}"],
        cwd=toy.root,
        env={**os.environ, "MAKEFLAGS": "", "MAKELEVEL": "0"},
        capture_output=True,
        text=True,
        check=False,
    )


def release_of(toy: Toy) -> Path:
    return toy.build / "release/re.3"


def build(toy: Toy) -> Path:
    done = make_release(toy)
    assert done.returncode == 0, done.stdout + done.stderr
    return release_of(toy)


def refused(toy: Toy) -> str:
    """`make release` that must be refused and must make no release."""
    done = make_release(toy)
    assert done.returncode != 0, done.stdout
    assert not release_of(toy).exists()
    return done.stderr


@pytest.fixture(scope="module")
def made(_full: Toy, tmp_path_factory: pytest.TempPathFactory) -> Toy:
    """Release 3 is built; for tests that only look at it."""
    toy = make_repository(_full.copy(tmp_path_factory.mktemp("made") / "project"))
    build(toy)
    return toy


def test_a_release_has_wheels_changes_and_checksums(made: Toy) -> None:
    out = release_of(made)
    ends = (f"-{ARM_TAG}", f"-{TAG}", f".cpu-{TAG}")
    wheels = {f"vllm-{VERSION}+re.3{end}.whl" for end in ends}
    paths = sorted(out.iterdir())
    assert {path.name for path in paths} == wheels | {"CHANGES.md", "SHA256SUMS"}
    sums = [f"{digest_of(path)}  {path.name}" for path in paths if path.name != "SHA256SUMS"]
    assert (out / "SHA256SUMS").read_text().splitlines() == sums
    assert (out / "CHANGES.md").read_text() == SECTION


def test_a_tag_gives_the_same_bytes_again_and_nothing_is_tagged_or_pushed(
    made: Toy, tmp_path: Path
) -> None:
    assert "tag" not in git(made.root, "for-each-ref")
    other = made.copy(tmp_path / "elsewhere")
    git(other.root, "remote", "add", "origin", str(other.root / "nowhere"))
    git(other.root, "tag", "re.3")
    shutil.rmtree(other.build / "release")
    before = git(other.root, "for-each-ref")
    assert made.snapshot(release_of(made)) == other.snapshot(build(other))
    assert git(other.root, "for-each-ref") == before
    # A release that is there already is compared and kept.
    (release_of(other) / "CHANGES.md").write_text("mine\n")
    assert "another release of this number" in make_release(other).stderr
    assert (release_of(other) / "CHANGES.md").read_text() == "mine\n"


def log(repo: Toy, old: str, new: str) -> None:
    (repo.root / "CHANGELOG.md").write_text(CHANGELOG.replace(old, new))
    commit(repo)


def later(repo: Toy) -> None:
    git(repo.root, "tag", "re.3")
    commit(repo, "Later")


def break_rule(repo: Toy) -> None:
    repo.edit_patch(NAMES[0], "Upstream-Status: Pending", "Upstream-Status: Maybe")
    commit(repo)


@pytest.mark.parametrize(
    ("do", "said"),
    [
        (lambda repo: (repo.root / "stray").write_text(""), "?? stray"),
        (lambda repo: shutil.rmtree(repo.root / ".git"), "not a git repository"),
        (partial(log, old="2030-02-01", new="unreleased"), "no section '## re.3, <date>'"),
        (partial(log, old="re.3", new="re.7"), "no section '## re.3, <date>'"),
        (later, "re.3 is released already"),
        (lambda repo: repo.commit("[Core] Later", {"vllm/later.py": "1\n"}), "would be lost"),
        (break_rule, "the series breaks its rules"),
    ],
)
def test_what_is_not_prepared_is_not_released(
    toy: Toy, do: Callable[[Toy], object], said: str
) -> None:
    do(make_repository(toy))
    assert said in refused(toy)
