# SPDX-License-Identifier: Apache-2.0
"""A branch for upstream: what is on it, who signs, what is refused; nothing is pushed."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.tools.toy import ENVS, FOLDED, HEADERS, NAMES, TREE, Toy, git, write_files
from tools.series.series import PROJECT_EMAIL, PROJECT_NAME

FIRST, SECOND, THIRD = NAMES
WHO = "Ada Person <ada@people.org>"
TEMPLATE = """\
## Purpose

<details>
<summary> The checklist </summary>

- [ ] Say how it was tested.
</details>

**BEFORE SUBMITTING** read this
"""
UPSTREAM = {
    **TREE,
    ".github/PULL_REQUEST_TEMPLATE.md": TEMPLATE,
    "vllm/envs.py": "BEFORE = 1\n" + ENVS,
}


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A person's clone of a later upstream, with an origin that it could push to."""
    path = tmp_path / "clone"
    git(tmp_path, "init", "--quiet", "--initial-branch=main", "clone")
    git(path, "config", "user.name", "Ada Person")
    git(path, "config", "user.email", "ada@people.org")
    commit(path, UPSTREAM)
    git(tmp_path, "clone", "--quiet", "--bare", str(path), "origin.git")
    git(path, "remote", "add", "origin", str(tmp_path / "origin.git"))
    git(path, "fetch", "--quiet", "origin")
    return path


def commit(clone: Path, files: dict[str, str]) -> None:
    write_files(clone, files)
    git(clone, "add", "--force", "--all")
    git(clone, "commit", "--quiet", "--message", "work")


SUBMIT = ("upstream", "submit", "--onto", "main", "--clone")


def submit(toy: Toy, clone: Path, *arguments: str) -> str:
    return toy.do(*SUBMIT, str(clone), *arguments)


def branches(repository: Path) -> list[str]:
    return git(repository, "for-each-ref", "--format=%(refname:short)", "refs/heads").splitlines()


def subjects(clone: Path, branch: str) -> list[str]:
    return git(clone, "log", "--reverse", "--format=%s", f"main..{branch}").splitlines()


def message(clone: Path, branch: str) -> str:
    return git(clone, "log", "-1", "--format=%B", branch)


def text(toy: Toy, branch: str) -> str:
    return (toy.build / f"submit/{branch}.md").read_text()


def add(toy: Toy, subject: str, name: str, body: str = HEADERS) -> None:
    toy.commit(subject, {f"vllm/{name}.py": f"{name.upper()} = 1\n"}, body)
    toy.do("series", "export")


def needing(*names: str) -> str:
    return HEADERS.replace("Drop-when", f"Needs: {', '.join(names)}\nDrop-when")


def test_a_branch_is_signed_by_the_sender_and_the_text_has_all_parts(toy: Toy, clone: Path) -> None:
    def state() -> list[str]:
        return [
            git(clone.parent / "origin.git", "for-each-ref"),
            git(clone, "for-each-ref", "refs/remotes", "refs/tags"),
            git(clone, "status", "--porcelain", "--branch"),
        ]

    (clone / "vllm/envs.py").write_text("work in progress\n")
    before, branch = state(), SECOND.removesuffix(".patch")
    assert "Nothing was pushed" in submit(toy, clone, SECOND)
    assert (state(), branches(clone)) == (before, sorted([branch, "main"]))
    assert not list(toy.build.glob(".submit-*"))
    assert git(clone, "rev-parse", f"{branch}^") == git(clone, "rev-parse", "main")
    envs = git(clone, "show", f"{branch}:vllm/envs.py") + "\n"
    assert envs == UPSTREAM["vllm/envs.py"] + "SETTING_40 = 40\n"
    changed = git(clone, "diff", "--name-only", "main", branch).splitlines()
    assert changed == ["tests/test_rows.py", "vllm/envs.py", "vllm/rows/__init__.py"]
    # Author, committer and sign-off are the sender's; the series' own headers are gone.
    said = git(clone, "log", "-1", "--format=%an <%ae>|%cn <%ce>", branch)
    assert said == f"{WHO}|{WHO}"
    body = "Rows are wanted; a user sees rows.\n\nSigned-off-by: "
    assert message(clone, branch) == f"{FOLDED}\n\n{body}{WHO}"
    said = text(toy, branch)
    for part in (
        *(f"\n## {name}\n" for name in ("Purpose", "Test Plan", "Test Result", "Statements")),
        "Rows are wanted; a user sees rows.",
        ".venv/bin/python -m pytest tests/test_rows.py -v",
        "pre-commit run --files tests/test_rows.py vllm/envs.py vllm/rows/__init__.py",
        "run the plan on main, put the output here",
        "AI assistance: ...",
        "Not a duplicate because: ...",
        "- [ ] Say how it was tested.",
    ):
        assert part in said
    for foreign in ("BEFORE SUBMITTING", "Upstream-Status", "Drop-when", "Signed-", PROJECT_EMAIL):
        assert foreign not in said


def test_a_patch_stands_on_what_it_needs_and_on_what_these_need(toy: Toy, clone: Path) -> None:
    add(toy, "[Core] One", "one")
    add(toy, "[Core] Two", "two", needing("one.patch", THIRD))
    add(toy, "[Core] Alone", "alone")
    add(toy, "[Core] Three", "three", needing("two.patch"))
    out = submit(toy, clone, "three")
    third = "[Misc] Drop the old module"
    assert subjects(clone, "three") == [third, "[Core] One", "[Core] Two", "[Core] Three"]
    assert "Needs" not in message(clone, "three")
    assert "stacked on drop-the-old-module.patch, one.patch, two.patch: these" in out
    said = text(toy, "three")
    assert "**Stacked.**" in said
    assert "- [Core] One\n" in said
    assert "Needs" not in said


Do = Callable[[Toy, Path], object]


def person(name: str, email: str) -> Do:
    def do(_: Toy, clone: Path) -> None:
        git(clone, "config", "user.name", name)
        git(clone, "config", "user.email", email)

    return do


def need_later(toy: Toy, _: Path) -> None:
    add(toy, "[Core] One", "one", needing("two.patch"))
    add(toy, "[Core] Two", "two")


def need_unsaid(toy: Toy, _: Path) -> None:
    envs = (toy.tree / "vllm/envs.py").read_text().replace("SETTING_9 = 99", "SETTING_9 = 5")
    toy.commit("[Core] Change it", {"vllm/envs.py": envs})
    toy.do("series", "export")


def upstream_has(value: str) -> Do:
    envs = ENVS.replace("SETTING_9 = 9\n", f"SETTING_9 = {value}\n")
    return lambda _, clone: commit(clone, {"vllm/envs.py": envs})


DENIED = HEADERS.replace("Pending", "Denied [there]")
PLACEHOLDERS = [("", ""), ("Ada Person", ""), ("Ada Person", "ada"), (PROJECT_NAME, PROJECT_EMAIL)]


@pytest.mark.parametrize(
    ("do", "words", "said"),
    [
        (None, "no-such", "the series has no such patch"),
        (None, "count-rows --branch bad..name", "bad..name"),
        (None, "count-rows --onto gone", "the clone has no such ref"),
        (None, "count-rows --clone nowhere", "not the top directory of a clone"),
        *((person(*who), FIRST, "a person's|user.name '...'") for who in PLACEHOLDERS),
        (
            lambda _, clone: git(clone, "branch", "taken"),
            f"{THIRD} --branch taken",
            "already exists",
        ),
        (lambda toy, _: add(toy, "[Core] Ours", "ours", DENIED), "ours", "Denied [there]"),
        (need_later, FIRST, "two.patch, which stands later"),
        (need_unsaid, "change-it", "conflicts in vllm/envs.py|Needs:"),
        (upstream_has("'nine'"), FIRST, f"a patch does not fit main|{FIRST}"),
        (upstream_has("99"), FIRST, f"main contains a patch|{FIRST}"),
    ],
)
def test_what_cannot_be_sent_is_refused_and_nothing_is_made(
    toy: Toy, clone: Path, do: Do | None, words: str, said: str
) -> None:
    if do:
        do(toy, clone)
        toy.do("series", "apply")
    before = (toy.everything(), branches(clone))
    error = toy.refuse(*SUBMIT, str(clone), *words.split())
    for part in said.split("|"):
        assert part in error
    assert (toy.everything(), branches(clone)) == before
