# SPDX-License-Identifier: Apache-2.0
"""The rules of the series: each breach is named with what stands there and what should."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tools.toy import NAMES, Toy
from tools.series.patch import IDENTITY, STATUS, STATUSES, leaves_tree, slug
from tools.series.series import parse_series, render_series


def test_a_good_series_passes(toy: Toy) -> None:
    assert toy.do("series", "check") == "series: 3 patches, no problems\n"


def test_a_problem_has_four_parts(toy: Toy) -> None:
    toy.edit_patch(NAMES[0], "Upstream-Status: Pending", "Upstream-Status: Waiting")
    expected = "Upstream-Status: Pending [why it was not sent yet] (the reason may be left out)"
    command = (
        "reword the commit (in the build tree: git rebase -i refs/re/base), then: series export"
    )
    assert toy.refuse("series", "check").splitlines() == [
        "error: the series breaks its rules: 1",
        "",
        "Upstream-Status is malformed",
        f"  where:    {NAMES[0]}",
        f"  expected: {expected}",
        "            or: Submitted [where: a link]",
        "            or: Backport [the upstream commit or release]",
        "            or: Denied [where, and why it is kept]",
        "            or: Inappropriate [why upstream would not want it]",
        "  found:    Upstream-Status: Waiting",
        f"  next:     {command}",
    ]


def test_all_problems_come_at_once(toy: Toy) -> None:
    toy.edit_patch(NAMES[0], "Drop-when: ", "Dropwhen: ")
    toy.edit_patch(NAMES[2], "Signed-off-by: ", "Signed: ")
    error = toy.refuse("series", "check")
    assert error.startswith("error: the series breaks its rules: 2\n")
    assert NAMES[0] in error
    assert NAMES[2] in error


@pytest.mark.parametrize(
    "line",
    [
        "upstream-status: Pending",
        "Upstream-Status:Pending",
        "Upstream status: Pending",
        "Upstream-Stauts: Pending",
        "Upstream-Status: pending",
        "Upstream-Status: Submitted",
        "Upstream-Status: Backport []",
        "Upstream-Status: Denied upstream did not want it",
        "Upstream-Status: Inappropriate",
    ],
)
def test_a_misspelt_status_is_reported_as_malformed(toy: Toy, line: str) -> None:
    toy.edit_patch(NAMES[0], "Upstream-Status: Pending", line)
    error = toy.refuse("series", "check")
    assert "Upstream-Status is malformed" in error
    assert f"found:    {line}" in error


@pytest.mark.parametrize("status", STATUSES)
def test_every_status_of_the_vocabulary_is_taken_with_an_argument(toy: Toy, status: str) -> None:
    line = f"Upstream-Status: {status} [an argument]"
    toy.edit_patch(NAMES[0], "Upstream-Status: Pending", line)
    toy.do("series", "check")


@pytest.mark.parametrize(
    ("name", "old", "new", "what"),
    [
        (NAMES[0], "Upstream-Status: Pending\n", "", "Upstream-Status is missing"),
        (NAMES[0], "Drop-when", "Upstream-Status: Pending\nDrop-when", "stands more than once"),
        (NAMES[0], "Drop-when: upstream returns rows\n", "", "Drop-when is missing"),
        (NAMES[0], "Drop-when: upstream returns rows", "Drop-when:", "Drop-when is malformed"),
        (NAMES[0], "Drop-when: ", "Drop when: ", "Drop-when is malformed"),
        (NAMES[0], "Drop-when: ", "drop-when: ", "Drop-when is malformed"),
        (NAMES[2], "Drop-when", "Needs: rows\nDrop-when", "Needs is malformed"),
        (NAMES[2], "Drop-when", "needs: one.patch\nDrop-when", "Needs is malformed"),
        (NAMES[2], "Drop-when", "Needs: a.patch b.patch\nDrop-when", "Needs is malformed"),
        (NAMES[0], "Rows are wanted; a user sees rows.\n", "", "the message has no body"),
    ],
)
def test_a_message_that_breaks_a_rule_is_refused(
    toy: Toy, name: str, old: str, new: str, what: str
) -> None:
    toy.edit_patch(name, old, new)
    assert what in toy.refuse("series", "check")


def test_a_need_that_stands_earlier_is_taken(toy: Toy) -> None:
    toy.edit_patch(NAMES[2], "Drop-when: ", f"Needs: {NAMES[0]}, {NAMES[1]}\nDrop-when: ")
    toy.do("series", "check")


def test_a_sign_off_of_somebody_else_is_not_enough(toy: Toy) -> None:
    toy.edit_patch(NAMES[0], f"Signed-off-by: {IDENTITY}", "Signed-off-by: Me <me@here>")
    error = toy.refuse("series", "check")
    assert "found:    Signed-off-by: Me <me@here>" in error
    assert f"expected: Signed-off-by: {IDENTITY}" in error


def test_trailing_blanks_are_reported_with_their_lines(toy: Toy) -> None:
    toy.edit_patch(NAMES[0], "+SETTING_9 = 99\n", "+SETTING_9 = 99 \t\n")
    number = (toy.patches / NAMES[0]).read_text().splitlines().index("+SETTING_9 = 99 \t") + 1
    error = toy.refuse("series", "check")
    assert "added lines end in blanks" in error
    assert f"{NAMES[0]}:{number} (vllm/envs.py:10)" in error


def test_trailing_blanks_in_context_and_removed_lines_are_allowed(toy: Toy) -> None:
    toy.edit_patch(NAMES[0], " SETTING_8 = 8\n", " SETTING_8 = 8  \n")
    toy.edit_patch(NAMES[0], "-SETTING_9 = 9\n", "-SETTING_9 = 9  \n")
    toy.do("series", "check")


@pytest.mark.parametrize("command", ["check", "apply"])
@pytest.mark.parametrize(
    ("old", "new", "what"),
    [
        ("vllm/rows/__init__.py", "../escaped.py", "a path leaves the tree"),
        ("vllm/rows/__init__.py", "vllm/../../escaped.py", "a path leaves the tree"),
        ("vllm/rows/__init__.py", "/escaped.py", "a path leaves the tree"),
        ("@@ -0,0 +1 @@", "@@ -0,0 +1,3 @@", "the diff cannot be read"),
        ("+++ b/vllm/rows/__init__.py", "+++ /etc/passwd", "the diff cannot be read"),
        ("vllm/rows/__init__.py", ".git/hooks/post-checkout", "a path leaves the tree"),
        ("new file mode 100644", "new file mode 120000", "a link is changed"),
        ("new file mode 100644", "new file mode 160000", "a link is changed"),
    ],
)
def test_a_damaged_or_dangerous_diff_is_refused(
    toy: Toy, old: str, new: str, what: str, command: str
) -> None:
    toy.do("series", "apply", "--pristine")
    path = toy.patches / NAMES[1]
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    error = toy.refuse("series", command)
    assert what in error
    assert NAMES[1] in error
    assert not list(toy.root.parent.rglob("escaped.py"))


def test_a_binary_file_is_refused(toy: Toy) -> None:
    (toy.tree / "vllm/data.bin").write_bytes(bytes(range(256)))
    toy.commit("[Core] Binary", {})
    assert "a binary file is changed" in toy.refuse("series", "export")


def test_a_listed_patch_that_does_not_exist_is_refused(toy: Toy) -> None:
    (toy.patches / NAMES[1]).unlink()
    for command in ("check", "apply"):
        error = toy.refuse("series", command)
        assert "a listed patch does not exist" in error
        assert NAMES[1] in error


@pytest.mark.parametrize("command", ["check", "apply"])
@pytest.mark.parametrize(
    ("name", "said"),
    [
        (NAMES[0], "a patch is listed twice"),
        ("../outside.patch", "not that of a patch beside it"),
    ],
)
def test_a_list_that_is_wrong_is_refused(toy: Toy, name: str, said: str, command: str) -> None:
    with (toy.patches / "series").open("a") as file:
        file.write(f"{name}\n")
    assert said in toy.refuse("series", command)


def test_a_patch_not_in_the_series_is_refused(toy: Toy) -> None:
    (toy.patches / "stray.patch").write_text("")
    error = toy.refuse("series", "check")
    assert "a patch is not in the series" in error
    assert "stray.patch" in error


def test_a_missing_series_file_is_reported(toy: Toy) -> None:
    (toy.patches / "series").unlink()
    assert "there is no series file" in toy.refuse("series", "check")


def fingerprint(toy: Toy) -> str:
    (line,) = re.findall(
        "^SERIES_FINGERPRINT=.*$", toy.do("wheel", "identity", "--variant", "cpu"), re.MULTILINE
    )
    return line


def test_the_fingerprint_changes_with_a_byte_with_the_order_and_with_the_pin(toy: Toy) -> None:
    seen = {fingerprint(toy)}
    assert fingerprint(toy) in seen
    series = toy.patches / "series"
    series.write_text("".join(f"{name}\n" for name in reversed(NAMES)))
    seen.add(fingerprint(toy))
    toy.edit_patch(NAMES[0], "Count rows", "Count Rows")
    seen.add(fingerprint(toy))
    pin = toy.pin
    line = next(line for line in pin.read_text().splitlines() if line.startswith("sha256"))
    pin.write_text(pin.read_text().replace(line, f'sha256 = "{"0" * 64}"', 1))
    seen.add(fingerprint(toy))
    assert len(seen) == 4


def test_a_comment_does_not_change_the_fingerprint(toy: Toy) -> None:
    before = fingerprint(toy)
    with (toy.patches / "series").open("a") as file:
        file.write("# a comment\n")
    assert fingerprint(toy) == before


names = st.lists(st.from_regex(r"[a-z]{1,4}\.patch", fullmatch=True), unique=True)
lines = st.lists(st.from_regex(r"( ?#[ a-z]*|[a-z]{1,4}\.patch( #x)?|)", fullmatch=True))


@settings(deadline=None)
@given(names, lines)
def test_a_rendered_series_lists_the_names_whatever_stood_there(
    wanted: list[str], old: list[str]
) -> None:
    text = render_series(wanted, "\n".join(old))
    assert parse_series(text) == wanted
    assert render_series(wanted, text) == text


@settings(deadline=None)
@given(st.text())
def test_a_slug_is_a_safe_file_name(subject: str) -> None:
    name = slug(subject)
    assert not leaves_tree(f"{name}.patch")
    assert name == name.strip("-").lower()
    assert parse_series(f"{name}.patch") == [f"{name}.patch"]


@settings(deadline=None)
@given(st.text(alphabet=st.characters(blacklist_characters="[]\n\r")))
def test_a_status_is_read_as_it_is_written(argument: str) -> None:
    right = STATUS.fullmatch(f"Upstream-Status: Denied [{argument}]")
    assert bool(right) == bool(argument[:1].strip())
