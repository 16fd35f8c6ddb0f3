# SPDX-License-Identifier: Apache-2.0
"""Patch files to commits and back, the rules of the series, and its status."""

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.tools.toy import FOLDED, HEADERS, NAMES, TREE, VERSION, Index, Toy, add_series, git
from tools.series.series import IDENTITY, STATUSES

MINE = "[Core] My evening's work"
HOSTILE = """
    user.name=Somebody user.email=else@where commit.gpgSign=true init.defaultBranch=other
    core.autocrlf=true core.abbrev=5 core.quotePath=false apply.whitespace=fix
    diff.noprefix=true diff.mnemonicPrefix=true diff.algorithm=histogram diff.context=9
    diff.interHunkContext=50 diff.renames=copies diff.external=false diff.relative=true
    diff.suppressBlankEmpty=true format.subjectPrefix=HOSTILE format.numbered=true
    format.signature=hostile format.signOff=true format.attach=boundary format.coverLetter=true
    format.thread=deep format.from=true format.to=someone@else format.headers=X-Hostile:yes
    format.encodeEmailHeaders=false format.pretty=fuller format.notes=true
    am.threeWay=true am.keepcr=false am.messageid=true mailinfo.scissors=true
"""
ENVIRONMENT = {
    **{f"GIT_{name}": "/nowhere" for name in ("DIR", "WORK_TREE", "INDEX_FILE")},
    **{f"GIT_{who}_DATE": "2001-01-01T00:00:00" for who in ("AUTHOR", "COMMITTER")},
    **{"GIT_AUTHOR_NAME": "Somebody", "GIT_EXTERNAL_DIFF": "false", "GIT_DEFAULT_HASH": "sha256"},
    **{"GIT_CONFIG_COUNT": "1", "GIT_CONFIG_KEY_0": "diff.noprefix", "GIT_CONFIG_VALUE_0": "true"},
    "TZ": "Asia/Tokyo",
}


@pytest.fixture
def hostile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A home and an environment that would change everything if git saw them."""
    home = tmp_path / "home"
    for place in ("hooks", "template/hooks"):
        for name in ("pre-commit", "post-checkout", "applypatch-msg", "pre-applypatch"):
            hook = home / place / name
            hook.parent.mkdir(parents=True, exist_ok=True)
            hook.write_text("#!/bin/sh\nexit 1\n")
            hook.chmod(0o755)
    places = f"core.hooksPath={home / 'hooks'} init.templateDir={home / 'template'}"
    for setting in f"{HOSTILE} {places}".split():
        git(home, "config", "--file", ".gitconfig", *setting.split("="))
    for key, value in {**ENVIRONMENT, "HOME": str(home), "XDG_CONFIG_HOME": str(home)}.items():
        monkeypatch.setenv(key, value)


def all_rows(toy: Toy) -> None:
    """Edit the second patch alone, as CONTRIBUTING says."""
    toy.edit("vllm/rows/__init__.py", "Rows", "All rows")
    git(toy.tree, "commit", "--quiet", "--all", r"--fixup=:/\[Frontend\]")
    git(toy.tree, "rebase", "--quiet", "-i", "--autosquash", "refs/re/base")


def more(toy: Toy, subject: str = "[Core] One more", name: str = "vllm/more.py") -> None:
    toy.commit(subject, {name: f"{subject}\n"})


def test_each_patch_is_a_commit_and_the_commit_names_it(toy: Toy) -> None:
    form = "--format=%s|%an <%ae>|%cn <%ce>|%aI|%cI|%(trailers:key=Patch-Filename,valueonly)"
    said = git(toy.tree, "log", "--reverse", form, "refs/re/base..HEAD").split("\n\n")
    dates = [f"2024-01-{day:02}T12:00:00+02:00" for day in (1, 2, 3)]
    subjects = ["[Core] Count rows", FOLDED, "[Misc] Drop the old module"]
    assert [line.strip() for line in said] == [
        f"{subject}|{IDENTITY}|{IDENTITY}|{date}|{date}|{name}"
        for subject, date, name in zip(subjects, dates, NAMES, strict=True)
    ]
    assert "SETTING_9 = 99\n" in (toy.tree / "vllm/envs.py").read_text()
    assert (toy.tree / "vllm/rows/__init__.py").read_text() == '"""Rows: Σ."""\n'
    assert not (toy.tree / "vllm/old.py").exists()


@pytest.mark.usefixtures("hostile")
def test_no_configuration_changes_a_byte(toy: Toy, empty: Toy) -> None:
    add_series(empty)
    assert toy.head() == empty.head()
    assert toy.snapshot() == empty.snapshot()


def test_the_release_and_the_whole_series_are_reached_from_each_other(toy: Toy) -> None:
    head = toy.head()
    assert "0 patches" in toy.do("series", "apply", "--pristine")
    assert toy.head() == git(toy.tree, "rev-parse", "refs/re/base")
    toy.do("series", "apply")
    index = (toy.tree / ".git/index").stat().st_mtime_ns
    assert "nothing to do" in toy.do("series", "apply")
    assert toy.head() == head
    assert (toy.tree / ".git/index").stat().st_mtime_ns == index


def test_discard_overrides_commits_and_changes_and_an_export_keeps_them(toy: Toy) -> None:
    head = toy.head()
    toy.mine()
    (toy.tree / "vllm/untracked.py").write_text("mine\n")
    toy.do("series", "apply", "--discard")
    assert (toy.head(), git(toy.tree, "status", "--porcelain")) == (head, "")
    toy.mine()
    toy.do("series", "export")
    toy.do("series", "apply", "--pristine")
    toy.do("series", "apply")
    assert (toy.tree / "vllm/mine.py").exists()


def detached(toy: Toy) -> None:
    git(toy.tree, "checkout", "--quiet", "--detach")
    toy.mine()


def elsewhere(toy: Toy) -> None:
    toy.mine()
    git(toy.tree, "checkout", "--quiet", "-b", "elsewhere", "refs/re/base")


def fuzz(toy: Toy) -> None:
    toy.do("series", "apply", "--pristine")
    toy.edit_patch(NAMES[1], "\n SETTING_38 = 38\n", "\n SETTING_38 = 'drifted'\n")


def other_pin(toy: Toy) -> None:
    text = re.sub(r'sha256 = "\w+"', f'sha256 = "{"0" * 64}"', toy.pin_file.read_text(), count=1)
    toy.pin_file.write_text(text)


def test_a_patch_keeps_its_file_name(toy: Toy) -> None:
    # Renamed with its line in the series, then edited and reworded in the build tree.
    (toy.patches / NAMES[1]).rename(toy.patches / "answers.patch")
    toy.edit_patch("series", NAMES[1], "answers.patch")
    toy.do("series", "apply")
    all_rows(toy)
    message = git(toy.tree, "log", "-1", "--format=%B").replace("Drop the", "Do without the")
    git(toy.tree, "commit", "--quiet", "--amend", "-m", message)
    toy.do("series", "export")
    assert toy.listed() == [NAMES[0], "answers.patch", NAMES[2]]
    assert b"Do without" in (toy.patches / NAMES[2]).read_bytes()


def merge(toy: Toy) -> None:
    git(toy.tree, "checkout", "-q", "-b", "side", "HEAD~1")
    more(toy, "[Core] Side")
    git(toy.tree, "checkout", "-q", "routed-experts")
    git(toy.tree, "merge", "-q", "--no-ff", "-m", "a merge", "side")


def namesakes(toy: Toy) -> None:
    more(toy)
    more(toy, "[Misc] One More!", "vllm/more2.py")


MISSING = [f"{header} is missing" for header in ("Upstream-Status", "Drop-when", "Signed-off-by")]


def add(
    subject: str, body: str, name: str = "vllm/more.py", text: str = "MORE = 1\n"
) -> Callable[[Toy], object]:
    return lambda toy: toy.commit(subject, {name: text} if name else {}, body)


APPLY = [
    (Toy.dirty, ["not committed", "vllm/envs.py"]),
    (lambda toy: (toy.tree / "vllm/new.py").write_text(""), ["not committed", "vllm/new.py"]),
    (Toy.mine, ["1 commits that would be lost", MINE, "--discard"]),
    (detached, [MINE]),
    (elsewhere, [MINE]),
    (lambda toy: (toy.tree / ".git/rebase-merge").mkdir(), ["under way"]),
    (fuzz, ["does not apply", NAMES[1], "apply --pristine", "$ git", "patch does not apply"]),
    (other_pin, ["belongs to another pin", f"expected: source sha256 {'0' * 64}"]),
    (lambda toy: git(toy.tree, "update-ref", "-d", "refs/re/base"), ["there is no build tree"]),
]
EXPORT = [
    (lambda toy: toy.do("series", "apply", "--pristine"), ["no commit in the build tree"]),
    (Toy.dirty, ["not committed"]),
    (merge, ["a merge commit has no patch"]),
    (add("fixup! [Core] X", HEADERS), ["fixup! [Core] X", "git rebase -i"]),
    (add("[Core] No headers", "Only words.\n"), ["no-headers.patch", *MISSING]),
    (add("[Core] Nothing", HEADERS, ""), ["nothing.patch", "does not apply"]),
    (add("[Core] Blanks", HEADERS, "vllm/blanks.py", "MORE = 1 \t\n"), ["trailing whitespace"]),
    (namesakes, ["one-more.patch", "[Core] One more / [Misc] One More!"]),
    (lambda toy: git(toy.tree, "reset", "-q", "--hard", "HEAD~1"), [f"--drop {NAMES[2]}"]),
    (add("[Core] Cut", HEADERS + "\ndiff --git this is not\n"), []),
    (add("[Core] Cut", HEADERS + "\n---\n\nnotes\n"), ["would not give back its commit"]),
]
LIST = [
    (lambda toy: (toy.patches / NAMES[1]).unlink(), ["found", NAMES[1]]),
    (lambda toy: (toy.patches / "stray.patch").write_text(""), ["a patch is not in the series"]),
    (lambda toy: toy.series_file.unlink(), ["there is no series file"]),
    (lambda toy: toy.series_file.write_text("a.patch\n" * 2), ["names another patch", "a.patch"]),
    (lambda toy: toy.series_file.write_text("../o.patch\n"), ["../o.patch"]),
    (lambda toy: toy.series_file.write_text("# a comment\n"), ["# a comment"]),
]


@pytest.mark.parametrize(
    ("command", "do", "said"),
    [
        *(("apply", *case) for case in APPLY),
        *(("export", *case) for case in EXPORT),
        *(("check", *case) for case in LIST),
    ],
)
def test_what_would_be_lost_or_cannot_be_a_series_is_refused_and_nothing_changes(
    toy: Toy, command: str, do: Callable[[Toy], object], said: list[str]
) -> None:
    do(toy)
    before = toy.everything()
    error = toy.refuse("series", command)
    for part in said:
        assert part in error
    assert toy.everything() == before


def test_a_patch_is_dropped_by_name(toy: Toy) -> None:
    git(toy.tree, "reset", "-q", "--hard", "HEAD~1")
    assert f"removed {NAMES[2]}" in toy.do("series", "export", "--drop", NAMES[2])
    assert sorted(toy.snapshot()) == sorted([*NAMES[:2], "series", "upstream.toml"])


def test_a_good_series_passes(toy: Toy) -> None:
    # Blanks that were there before are no breach, nor is a need that stands earlier.
    toy.edit_patch(NAMES[0], " SETTING_8 = 8\n", " SETTING_8 = 8  \n")
    toy.edit_patch(NAMES[0], "-SETTING_9 = 9\n", "-SETTING_9 = 9  \n")
    toy.edit_patch(NAMES[2], "Drop-when: ", f"Needs: {NAMES[0]}, {NAMES[1]}\nDrop-when: ")
    assert toy.do("series", "check") == "series: 3 patches, no problems\n"
    status = "Upstream-Status: Pending"
    for name in STATUSES:
        toy.edit_patch(NAMES[0], status, f"Upstream-Status: {name} [an argument]")
        status = f"Upstream-Status: {name} [an argument]"
        toy.do("series", "check")


def test_problems_come_at_once_and_each_has_four_parts(toy: Toy) -> None:
    toy.edit_patch(NAMES[0], "Upstream-Status: Pending", "Upstream-Status: Waiting")
    toy.edit_patch(NAMES[2], "Signed-off-by: ", "Signed: ")
    assert toy.refuse("series", "check").splitlines()[:5] == [
        "error: the series breaks its rules: 2",
        "",
        "Upstream-Status is missing or not as it should be",
        f"  where:    {NAMES[0]}",
        f"  expected: Upstream-Status: {' or '.join(STATUSES)} [where or why]",
    ]
    assert f"Signed-off-by is missing\n  where:    {NAMES[2]}" in toy.refuse("series", "check")


MALFORMED = [
    *("upstream-status: Pending", "Upstream-Status:Pending", "Upstream-Status: pending"),
    *("Upstream-Status: Backport []", "Upstream-Status: Denied it", ""),
]


@pytest.mark.parametrize(
    ("old", "new", "what"),
    [
        *(("Upstream-Status: Pending", new, "Upstream-Status is") for new in MALFORMED),
        ("Drop-when", "Upstream-Status: Pending\nDrop-when", "Upstream-Status is"),
        ("Drop-when: upstream returns rows\n", "", "Drop-when is"),
        ("Drop-when: upstream returns rows", "Drop-when:", "Drop-when is"),
        ("Drop-when: ", "drop-when: ", "Drop-when is"),
        ("Drop-when", "Needs: rows\nDrop-when", "Needs is"),
        ("Drop-when", "Needs: a.patch b.patch\nDrop-when", "Needs is"),
        ("Drop-when", f"Needs: {NAMES[2]}\nDrop-when", f"{NAMES[2]}, which stands later"),
        ("Drop-when", "Needs: no.patch\nDrop-when", "no.patch, which is not in the series"),
        ("Rows are wanted; a user sees rows.\n", "", "the message has no body"),
        (f"by: {IDENTITY}", "by: Me <me@here>", "found:    Signed-off-by: Me <me@here>"),
        ("Subject: [PATCH] [Core] Count rows", "Subject: [PATCH] [Core]", "has no subject"),
    ],
)
def test_a_message_that_breaks_a_rule_is_refused(toy: Toy, old: str, new: str, what: str) -> None:
    toy.edit_patch(NAMES[0], old, new)
    error = toy.refuse("series", "check")
    assert what in error
    assert NAMES[0] in error


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("vllm/rows/__init__.py", "../escaped.py"),
        ("vllm/rows/__init__.py", "vllm/../../escaped.py"),
        ("vllm/rows/__init__.py", "/escaped.py"),
        ("vllm/rows/__init__.py", ".git/hooks/post-checkout"),
        ("@@ -0,0 +1 @@", "@@ -0,0 +1,3 @@"),
    ],
)
def test_a_damaged_or_dangerous_diff_is_refused(toy: Toy, old: str, new: str) -> None:
    toy.do("series", "apply", "--pristine")
    path = toy.patches / NAMES[1]
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    assert f"does not apply; nothing was changed\n  where:    {NAMES[1]}" in toy.refuse(
        "series", "apply"
    )
    assert not list(toy.root.parent.rglob("escaped.py"))


def test_the_fingerprint_changes_with_a_byte_with_the_order_and_with_the_pin(toy: Toy) -> None:
    def fingerprint() -> str:
        return status(toy)["series"]

    seen = [fingerprint()]
    toy.series_file.write_text("".join(f"{name}\n" for name in reversed(NAMES)))
    seen.append(fingerprint())
    toy.edit_patch(NAMES[0], "Count rows", "Count Rows")
    seen.append(fingerprint())
    other_pin(toy)
    assert len({*seen, fingerprint()}) == 4


def status(toy: Toy) -> dict[str, str]:
    """The lines of a status by their topic; a patch has its name as the topic."""
    said: dict[str, str] = {}
    for line in toy.do("series", "status").splitlines():
        what, _, rest = line.strip().partition(" ")
        said[what] = f"{said[what]}; {rest.strip()}" if what in said else rest.strip()
    return said


def test_an_applied_series_has_not_drifted(toy: Toy, index: Index) -> None:
    before = toy.everything()
    said = status(toy)
    assert said["pin"].startswith(f"vLLM {VERSION}, v{VERSION}, commit cccccc")
    assert said["newest"] == f"{VERSION}, the pinned one"
    assert said["series"].startswith("3 patches, fingerprint ")
    assert said["applied"] == f"in {toy.tree}"
    assert "records" not in said
    index.withdrawn.add("vllm-9.9.9.tar.gz")
    for version in ("9.8.8", "9.8.10", "9.9.0rc1", "9.9.9", "1.0.0"):
        index.publish(version, TREE, wheels=False)
    assert status(toy)["newest"] == "9.8.10, 2 releases after the pinned one"
    assert toy.everything() == before


def test_records_of_another_series_are_named(toy: Toy) -> None:
    results = toy.root / "benchmarks/results"
    (results / "line").mkdir(parents=True)
    today = status(toy)["series"].split()[-1].removesuffix("...")
    (results / "new.md").write_text(f"# New\n\nseries: {today}\nof vLLM `0123456789abcdef`\n")
    (results / "old.md").write_text("# Old, with the series of 3 patches (`0123456789abcdef`)\n")
    (results / "line/both.md").write_text(f"Series: `{today}`\nseries: 0123456789abcdef, some\n")
    (results / "README.md").write_text("Of the series (`7b32d2b`).\n")
    assert status(toy)["records"] == "of another series: line/both.md, old.md"


@pytest.mark.parametrize(
    ("do", "topic", "said"),
    [
        (lambda toy: shutil.rmtree(toy.tree), "applied", "no: there is no build tree.*"),
        (other_pin, "applied", ".*belongs to another pin.*"),
        (lambda toy: toy.do("series", "apply", "--pristine"), "applied", ".*not the series.*"),
        (Toy.mine, "applied", re.escape(f"1 commit not exported: {MINE}").join((".*", ".*"))),
        (Toy.dirty, "applied", ".*1 file changed and not committed in the build tree.*"),
        (
            lambda toy: toy.edit_patch(NAMES[1], "Rows are", "They are"),
            "applied",
            ".*not the seri.*",
        ),
        (lambda toy: (toy.patches / NAMES[0]).unlink(), "series", "cannot be read: the list.*"),
    ],
)
def test_every_drift_is_told(toy: Toy, do: Callable[[Toy], object], topic: str, said: str) -> None:
    do(toy)
    assert re.fullmatch(said, status(toy)[topic])


def test_without_an_answer_the_newest_release_is_unknown(toy: Toy) -> None:
    said = status(toy)
    assert said["newest"].startswith("unknown: the package index")
    assert said["applied"] == f"in {toy.tree}"
