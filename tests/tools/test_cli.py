# SPDX-License-Identifier: Apache-2.0
"""The entry point: its help, and how it shows errors."""

from pathlib import Path

import pytest

import tools.__main__
from tests.tools.toy import Toy
from tools.__main__ import PACKAGES, main, parser
from tools.common.cli import ToolError
from tools.common.git import Git
from tools.common.pin import Project

TOOLS = Path(tools.__main__.__file__).parent
COMMANDS = [
    (path.parent.name, path.stem.replace("_", "-"))
    for path in TOOLS.glob("*/*.py")
    if "\ndef run(" in path.read_text()
]


def test_every_command_is_listed_and_has_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert sorted((p, c) for p, commands in PACKAGES.items() for c in commands) == sorted(COMMANDS)
    for package, command in COMMANDS:
        with pytest.raises(SystemExit, match="0"):
            main([package, command, "--help"])
        text = " ".join(capsys.readouterr().out.split())
        assert text.startswith(f"usage: python -m tools {package} {command} ")


def test_wrong_usage_ends_with_status_two() -> None:
    for words in ([], ["series"], ["series", "unknown"], ["wheel", "build"]):
        with pytest.raises(SystemExit, match="2"):
            main(words)


def test_the_root_is_the_repository_of_the_tools(empty: Toy) -> None:
    root = parser().parse_args(["series", "apply"]).root
    assert (root / "tools" / "__main__.py").is_file()
    assert Project(root).pin_file.is_file()
    empty.pin_file.unlink()
    assert "the pin is missing" in empty.refuse("series", "apply")


def test_a_failed_command_shows_itself_and_its_output_indented(tmp_path: Path) -> None:
    with pytest.raises(ToolError) as failure:
        Git(tmp_path).run("cat-file", "-p", "no such thing")
    lines = str(failure.value).splitlines()
    assert lines[0] == "a command failed with exit status 128"
    assert lines[1] == f"    $ git -C {tmp_path} cat-file -p 'no such thing'"
    assert lines[2].startswith("    fatal: ")
