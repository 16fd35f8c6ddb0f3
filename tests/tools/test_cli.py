# SPDX-License-Identifier: Apache-2.0
"""The entry point: its help, and how it shows errors."""

import re
import shlex
from pathlib import Path

import pytest

import tools.__main__
from tools.__main__ import main, parser
from tools.common.errors import ToolError
from tools.common.git import Git
from tools.common.pin import Project

TOOLS = Path(tools.__main__.__file__).parent
COMMANDS = [
    (path.parent.name, path.stem.replace("_", "-"))
    for path in TOOLS.glob("*/*.py")
    if "\ndef run(" in path.read_text()
]


def help_of(*arguments: str, capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as stop:
        main([*arguments, "--help"])
    assert stop.value.code == 0
    return capsys.readouterr().out


def test_every_command_has_an_example_that_parses_in_its_help_and_in_that_of_the_tools(
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = help_of(capsys=capsys)
    examples = re.findall(r"^  python -m tools (.*)$", text, re.MULTILINE)
    assert {tuple(line.split()[:2]) for line in examples} == set(COMMANDS)
    for line in examples:
        words = shlex.split(line)
        parser().parse_args(words)
        own = help_of(*words[:2], capsys=capsys)
        assert own.endswith(f"example:\n  python -m tools {line}\n")


@pytest.mark.parametrize("package", ["source", "locks", "series", "wheel", "upstream"])
def test_the_help_of_a_room_lists_its_verbs(
    package: str, capsys: pytest.CaptureFixture[str]
) -> None:
    text = help_of(package, capsys=capsys)
    listed = re.findall(r"^    ([a-z-]+)", text, re.MULTILINE)
    assert sorted(listed) == sorted(command for other, command in COMMANDS if other == package)


def test_wrong_usage_ends_with_status_two() -> None:
    for words in ([], ["series"], ["series", "unknown"], ["wheel", "build"]):
        with pytest.raises(SystemExit) as stop:
            main(words)
        assert stop.value.code == 2


def test_a_failed_command_shows_itself_and_its_output_indented(tmp_path: Path) -> None:
    git = Git(tmp_path)
    git.init("main")
    with pytest.raises(ToolError) as failure:
        git.run("cat-file", "-p", "no such thing")
    lines = str(failure.value).splitlines()
    assert lines[0] == "a command failed with exit status 128"
    assert lines[1] == f"    $ git -C {tmp_path} cat-file -p 'no such thing'"
    assert lines[2].startswith("    fatal: ")


def test_a_missing_pin_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--root", str(tmp_path), "source", "fetch"]) == 1
    assert "the pin is missing" in capsys.readouterr().err


def test_the_root_is_the_repository_of_the_tools() -> None:
    root = parser().parse_args(["source", "fetch"]).root
    assert (root / "tools" / "__main__.py").is_file()
    assert Project(root).pin_file.is_file()


def test_rooms_import_only_rooms_below_them() -> None:
    packages = ("common", "source", ("locks", "series"), "wheel", "upstream")
    below: set[str] = set()
    for floor in packages:
        names = {floor} if isinstance(floor, str) else set(floor)
        for name in names:
            text = "".join(path.read_text() for path in (TOOLS / name).glob("*.py"))
            imported = set(re.findall(r"^from tools\.(\w+)", text, re.MULTILINE))
            assert imported <= below | {name}
        below |= names
