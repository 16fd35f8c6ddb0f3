# SPDX-License-Identifier: Apache-2.0
"""Branches for upstream: what is on them, who signs, what is refused; nothing is pushed."""

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.tools.toy import ENVS, HEADERS, NAMES, TREE, VERSION, Toy, git, trouble
from tests.tools.upstream import commit, configure, everything, make_clone
from tools.series.patch import PROJECT_EMAIL, PROJECT_NAME

FIRST, SECOND, THIRD = NAMES
TEMPLATE = """\
<!-- markdownlint-disable -->
## Purpose

## Test Plan

<details>
<summary> The checklist </summary>

- [ ] Say why.
- [ ] Say how it was tested.
</details>

**BEFORE SUBMITTING** read this
"""
UPSTREAM = {
    **TREE,
    ".github/PULL_REQUEST_TEMPLATE.md": TEMPLATE,
    "AGENTS.md": "# Rules\n",
    "vllm/envs.py": "BEFORE = 1\n" + ENVS,
}


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A person's clone of a later upstream, with an origin that it could push to."""
    path = tmp_path / "clone"
    make_clone(path, {VERSION: TREE})
    commit(path, UPSTREAM, "some work since")
    git(tmp_path, "clone", "--quiet", "--bare", str(path), "origin.git")
    git(path, "remote", "add", "origin", str(tmp_path / "origin.git"))
    git(path, "fetch", "--quiet", "origin")
    return path


def submit(toy: Toy, clone: Path, *arguments: str) -> str:
    return toy.do("upstream", "submit", "--clone", str(clone), "--onto", "main", *arguments)


def stop(toy: Toy, clone: Path, *arguments: str) -> str:
    return toy.refuse("upstream", "submit", "--clone", str(clone), "--onto", "main", *arguments)


def branches(repository: Path) -> list[str]:
    return git(repository, "for-each-ref", "--format=%(refname:short)", "refs/heads").splitlines()


def subjects(clone: Path, branch: str) -> list[str]:
    return git(clone, "log", "--reverse", "--format=%s", f"main..{branch}").splitlines()


def text(toy: Toy, branch: str) -> str:
    return (toy.build / f"submit/{branch}.md").read_text()


def add(toy: Toy, subject: str, files: dict[str, str], body: str = HEADERS) -> None:
    toy.commit(subject, files, body)
    toy.do("series", "export")


def stem(name: str) -> str:
    return name.removesuffix(".patch")


# --- what is on a branch ------------------------------------------------------------------------


def test_every_pending_patch_gets_a_branch_and_a_text(toy: Toy, clone: Path) -> None:
    submit(toy, clone)
    assert branches(clone) == sorted([*map(stem, NAMES), "main"])
    for name in NAMES:
        assert len(subjects(clone, stem(name))) == 1
        assert text(toy, stem(name))


def test_a_branch_is_the_patch_merged_into_its_base(toy: Toy, clone: Path) -> None:
    submit(toy, clone, SECOND)
    branch = stem(SECOND)
    assert git(clone, "rev-parse", f"{branch}^") == git(clone, "rev-parse", "main")
    envs = git(clone, "show", f"{branch}:vllm/envs.py") + "\n"
    assert envs == UPSTREAM["vllm/envs.py"] + "SETTING_40 = 40\n"
    changed = git(clone, "diff", "--name-only", "main", branch).splitlines()
    assert changed == ["tests/test_rows.py", "vllm/envs.py", "vllm/rows/__init__.py"]


def test_the_person_is_author_and_signs_off_and_the_series_headers_go(
    toy: Toy, clone: Path
) -> None:
    submit(toy, clone, FIRST)
    said = git(clone, "log", "-1", "--format=%an <%ae>|%cn <%ce>|%B", stem(FIRST))
    who = "Ada Person <ada@people.org>"
    message = (
        f"[Core] Count rows\n\nRows are wanted; a user sees rows.\n\nSigned-off-by: {who}".strip()
    )
    assert said == f"{who}|{who}|{message}"


def test_trailers_of_others_are_kept(toy: Toy, clone: Path) -> None:
    add(
        toy,
        "[Core] More",
        {"vllm/more.py": "MORE = 1\n"},
        HEADERS + "Co-authored-by: Bo <b@c.org>\n",
    )
    submit(toy, clone, "more")
    trailers = git(clone, "log", "-1", "--format=%(trailers)", "more").splitlines()
    assert trailers == [
        "Co-authored-by: Bo <b@c.org>",
        "Signed-off-by: Ada Person <ada@people.org>",
    ]


def test_every_commit_carries_the_senders_sign_off_instead_of_one_by_nobody(
    toy: Toy, clone: Path
) -> None:
    add(toy, "[Core] First", {"vllm/a.py": "A = 1\n"})
    body = needing("first.patch") + "Signed-off-by: Somebody <dev@example.invalid>\n"
    add(toy, "[Core] More", {"vllm/more.py": "MORE = 1\n"}, body)
    submit(toy, clone, "more")
    signed = git(clone, "log", "--format=%(trailers:key=Signed-off-by)", "main..more")
    assert signed.split("\n\n") == ["Signed-off-by: Ada Person <ada@people.org>"] * 2


def test_a_topic_is_one_branch_of_all_its_patches(toy: Toy, clone: Path) -> None:
    out = submit(toy, clone, THIRD, FIRST, "--topic", "rows/all")
    assert branches(clone) == ["main", "rows/all"]
    assert subjects(clone, "rows/all") == ["[Core] Count rows", "[Misc] Drop the old module"]
    assert f"branch rows/all: {FIRST}, {THIRD}" in out
    assert "### [Misc] Drop the old module" in text(toy, "rows-all")


# --- what a patch needs -------------------------------------------------------------------------


def needing(*names: str) -> str:
    return HEADERS.replace("Drop-when", f"Needs: {', '.join(names)}\nDrop-when")


def test_a_patch_stands_on_those_that_its_header_names(toy: Toy, clone: Path) -> None:
    add(toy, "[Core] Add a count", {"vllm/count.py": "COUNT = 1\n"})
    add(toy, "[Core] Use it", {"vllm/use.py": "USE = 1\n"}, needing("add-a-count.patch", THIRD))
    out = submit(toy, clone, "use-it")
    third = "[Misc] Drop the old module"
    assert subjects(clone, "use-it") == [third, "[Core] Add a count", "[Core] Use it"]
    assert "Needs" not in git(clone, "log", "-1", "--format=%B", "use-it")
    assert "stacked on" in out
    assert "add-a-count.patch" in out
    said = text(toy, "use-it")
    assert "**Stacked.**" in said
    assert "- [Core] Add a count" in said
    assert "Needs" not in said


def test_needs_of_needs_are_needed(toy: Toy, clone: Path) -> None:
    add(toy, "[Core] One", {"vllm/one.py": "ONE = 1\n"})
    add(toy, "[Core] Two", {"vllm/two.py": "TWO = 1\n"}, needing("one.patch"))
    add(toy, "[Core] Alone", {"vllm/alone.py": "ALONE = 1\n"})
    add(toy, "[Core] Three", {"vllm/three.py": "THREE = 1\n"}, needing("two.patch"))
    submit(toy, clone, "three")
    assert subjects(clone, "three") == ["[Core] One", "[Core] Two", "[Core] Three"]


def test_a_need_that_does_not_stand_earlier_is_refused(toy: Toy, clone: Path) -> None:
    add(toy, "[Core] One", {"vllm/one.py": "ONE = 1\n"}, needing("two.patch", "no-such.patch"))
    add(toy, "[Core] Two", {"vllm/two.py": "TWO = 1\n"})
    for error in (toy.refuse("series", "check"), stop(toy, clone, FIRST)):
        assert "a patch needs one that does not stand before it" in error
        assert "two.patch, which stands later" in error
        assert "no-such.patch, which is not in the series" in error


def test_a_patch_that_stands_on_one_that_its_header_does_not_name_is_refused(
    toy: Toy, clone: Path
) -> None:
    envs = (toy.tree / "vllm/envs.py").read_text()
    files = {"vllm/envs.py": envs.replace("SETTING_9 = 99", "SETTING_9 = 5")}
    add(toy, "[Core] Change it", files)
    error = stop(toy, clone, "change-it")
    assert "conflicts in vllm/envs.py" in error
    assert "Needs:" in error
    assert branches(clone) == ["main"]


# --- the text -----------------------------------------------------------------------------------


def test_the_text_has_purpose_plan_results_statements_and_upstreams_checklist(
    toy: Toy, clone: Path
) -> None:
    submit(toy, clone, SECOND)
    said = text(toy, stem(SECOND))
    for heading in ("Purpose", "Test Plan", "Test Result", "Statements"):
        assert f"\n## {heading}\n" in said
    assert "Rows are wanted; a user sees rows." in said
    assert ".venv/bin/python -m pytest tests/test_rows.py -v" in said
    assert "pre-commit run --files tests/test_rows.py vllm/envs.py vllm/rows/__init__.py" in said
    assert "run the plan on main, put the output here" in said
    assert "AI assistance: ..." in said
    assert "Not a duplicate because: ..." in said
    assert "- [ ] Say how it was tested." in said
    assert "BEFORE SUBMITTING" not in said
    for foreign in ("Upstream-Status", "Drop-when", PROJECT_EMAIL):
        assert foreign not in said


def test_a_header_of_two_lines_is_left_out_whole(toy: Toy, clone: Path) -> None:
    body = HEADERS.replace("returns rows\n", "returns rows, and\n tells of them\n")
    add(toy, "[Core] More", {"vllm/more.py": "MORE = 1\n"}, body)
    submit(toy, clone, "more")
    assert "tells of them" not in text(toy, "more")
    assert "tells of them" not in git(clone, "log", "-1", "--format=%B", "more")


def test_how_a_patch_was_tested_stands_in_the_plan(toy: Toy, clone: Path) -> None:
    body = HEADERS.replace("\n\n", "\n\nTested: by hand, twice.\n\n", 1)
    add(toy, "[Core] More", {"vllm/more.py": "MORE = 1\n"}, body)
    submit(toy, clone, "more")
    purpose, plan = text(toy, "more").split("## Test Plan")
    assert "Tested: by hand, twice." in plan
    assert "Tested:" not in purpose


# --- nothing leaves -----------------------------------------------------------------------------


def test_nothing_is_pushed_and_the_clone_stays_where_it_is(
    toy: Toy, clone: Path, tmp_path: Path
) -> None:
    (clone / "vllm/envs.py").write_text("work in progress\n")
    before = (
        git(tmp_path / "origin.git", "for-each-ref"),
        git(clone, "for-each-ref", "refs/remotes", "refs/tags"),
        git(clone, "status", "--porcelain", "--branch"),
    )
    out = submit(toy, clone)
    assert "Nothing was pushed" in out
    assert "read every changed line" in out
    assert "vLLM's own rules, as of main: AGENTS.md" in out
    after = (
        git(tmp_path / "origin.git", "for-each-ref"),
        git(clone, "for-each-ref", "refs/remotes", "refs/tags"),
        git(clone, "status", "--porcelain", "--branch"),
    )
    assert after == before
    assert not list(toy.build.glob(".submit-*"))


@pytest.mark.usefixtures("person")
def test_without_a_clone_the_branches_stand_on_the_pin_in_the_build_tree(toy: Toy) -> None:
    out = toy.do("upstream", "submit", FIRST)
    assert git(toy.tree, "rev-parse", f"{stem(FIRST)}^") == git(
        toy.tree, "rev-parse", "refs/re/base"
    )
    assert "--clone" in out
    assert "nothing to do" in toy.do("series", "apply")
    toy.do("series", "export", "--check")


def test_the_same_command_again_gives_the_same_branch(toy: Toy, clone: Path) -> None:
    submit(toy, clone, FIRST)
    head = git(clone, "rev-parse", stem(FIRST))
    assert f"branch {stem(FIRST)} (as it was)" in submit(toy, clone, FIRST)
    assert git(clone, "rev-parse", stem(FIRST)) == head


def test_a_branch_that_exists_is_replaced_only_when_told(toy: Toy, clone: Path) -> None:
    git(clone, "branch", stem(THIRD), "main")
    error = stop(toy, clone)
    assert "a branch of this name exists" in error
    assert branches(clone) == sorted(["main", stem(THIRD)])
    assert not (toy.build / "submit").exists()
    submit(toy, clone, "--replace")
    assert subjects(clone, stem(THIRD)) == ["[Misc] Drop the old module"]


def test_a_branch_that_is_checked_out_is_not_replaced(toy: Toy, clone: Path) -> None:
    git(clone, "checkout", "--quiet", "-b", stem(THIRD))
    assert "(checked out)" in stop(toy, clone, THIRD, "--replace")
    assert git(clone, "status", "--porcelain") == ""


def test_a_text_that_cannot_be_written_leaves_no_branch(toy: Toy, clone: Path) -> None:
    text = f"{stem(THIRD)}.md"
    with trouble("pathlib.Path.replace", lambda _, target: target.name == text):
        submit(toy, clone)
    assert branches(clone) == ["main"]
    assert not list((toy.build / "submit").iterdir())


TEXTS = itertools.count(1)
SECOND_TEXT = ("tools.upstream.submit.render_request", lambda *_: next(TEXTS) == 2)
PUBLISHING = ("tools.common.git.Git.run", lambda *words: words[1:3] == ("update-ref", "--stdin"))


@pytest.mark.parametrize(("place", "when"), [SECOND_TEXT, PUBLISHING])
def test_trouble_leaves_no_branch_and_no_text(
    toy: Toy, clone: Path, place: str, when: Callable[..., bool]
) -> None:
    before = (everything(toy), git(clone, "for-each-ref"))
    with trouble(place, when):
        submit(toy, clone)
    build = toy.build / "submit"
    assert not list(build.iterdir() if build.exists() else [])
    if build.exists():
        build.rmdir()
    assert (everything(toy), git(clone, "for-each-ref")) == before


# --- refusals -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "email"),
    [
        ("", ""),
        ("Ada Person", ""),
        ("Ada Person", "ada"),
        ("Ada Person", "ada@localhost"),
        ("Ada Person", "ada@example.com"),
        ("Ada Person", "ada@mail.example.org"),
        ("Ada Person", "ada@people.invalid"),
        ("Your Name", "ada@people.org"),
        ("root", "root@people.org"),
        (PROJECT_NAME, PROJECT_EMAIL),
    ],
)
def test_a_placeholder_identity_cannot_sign_off(
    toy: Toy, clone: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, email: str
) -> None:
    for key in ("name", "email"):
        git(clone, "config", "--unset", f"user.{key}")
    configure(tmp_path, monkeypatch, name, email)
    error = stop(toy, clone)
    assert "a sign-off is a person's" in error
    assert "git config --global user.name" in error
    assert branches(clone) == ["main"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("no-such",), "the series has no such patch"),
        ((FIRST, "--topic", "Bad Name"), "no name for a branch"),
    ],
    ids=["patch", "topic"],
)
def test_unusable_arguments_are_refused(
    toy: Toy, clone: Path, words: tuple[str, ...], said: str
) -> None:
    before = everything(toy)
    assert said in stop(toy, clone, *words)
    assert branches(clone) == ["main"]
    assert everything(toy) == before


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--onto", "main"), "name both: --clone"),
        (("--clone", "{clone}"), "name both: --clone"),
        (("--clone", "{clone}", "--onto", "gone"), "the clone has no such ref"),
    ],
)
def test_a_missing_base_is_refused(
    toy: Toy, clone: Path, words: tuple[str, ...], said: str
) -> None:
    places = [word.format(clone=clone) for word in words]
    assert said in toy.refuse("upstream", "submit", *places)


@pytest.mark.parametrize(
    "status", ["Inappropriate [only here]", "Denied [there]", "Backport [9.9.9]"]
)
def test_a_patch_that_is_not_for_upstream_is_refused_by_name_and_left_out_else(
    toy: Toy, clone: Path, status: str
) -> None:
    body = HEADERS.replace("Upstream-Status: Pending", f"Upstream-Status: {status}")
    add(toy, "[Core] Ours", {"vllm/ours.py": "OURS = 1\n"}, body)
    error = stop(toy, clone, "ours")
    assert "not for upstream" in error
    assert f"found:    {status}" in error
    submit(toy, clone)
    assert "ours" not in branches(clone)


def test_a_base_that_a_patch_does_not_fit_is_refused(toy: Toy, clone: Path) -> None:
    envs = ENVS.replace("SETTING_9 = 9\n", "SETTING_9 = 'nine'\n")
    commit(clone, {**UPSTREAM, "vllm/envs.py": envs}, "clash")
    error = stop(toy, clone)
    assert "a patch does not fit main" in error
    assert FIRST in error
    assert "conflicts in vllm/envs.py" in error
    assert branches(clone) == ["main"]


def test_a_patch_that_the_base_contains_is_refused(toy: Toy, clone: Path) -> None:
    envs = ENVS.replace("SETTING_9 = 9\n", "SETTING_9 = 99\n")
    commit(clone, {**UPSTREAM, "vllm/envs.py": envs}, "taken")
    assert "main contains a patch already" in stop(toy, clone, FIRST)
