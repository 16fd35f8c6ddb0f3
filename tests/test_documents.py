# SPDX-License-Identifier: Apache-2.0
"""The commands of README and CONTRIBUTING, executed as they stand in a scratch clone."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from harness.checkpoint import make_checkpoint
from harness.lines import LINES
from harness.process import QUIET, Kept, free_port
from tools.common.cli import ToolError
from tools.common.pin import DEFAULT_LINE
from tools.source.fetch import Index

ROOT = Path(__file__).resolve().parent.parent
LINE = DEFAULT_LINE

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

# What a person would type into the editor, by what it is opened on.
EDITOR = """\
#!/bin/bash
set -eu
case "$1" in
    */COMMIT_EDITMSG) cat "$MESSAGE" >"$1" ;;
    */git-rebase-todo) sed -i "$TODO" "$1" ;;
    *) sed -i '2a # Edited by a test.' "$1" ;;
esac
"""
MESSAGE = """\
[Misc] Say something by a test

It is edited here, so that a command of the documents has something to do.

Tested: by the test that does it.

Upstream-Status: Inappropriate [a test]
Drop-when: the test ends
Signed-off-by: vLLM routed experts <patches@vllm-routed-experts.invalid>
"""
# The patch of this message, and the one that the document splits.
FRESH, METRICS = "say-something-by-a-test.patch", "routed-experts-metrics.patch"
# The patch that it drops.
LAST = "routed-experts-no-rejected-counts.patch"


def blocks(name: str) -> dict[str, list[str]]:
    """The shell blocks of a document, by the heading above them."""
    found: dict[str, list[str]] = {}
    heading = ""
    text = (ROOT / name).read_text(encoding="utf-8")
    for match in re.finditer(r"^#+ ([^\n]+)$|^```sh\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        if match[1]:
            heading = match[1]
        else:
            found.setdefault(heading, []).append(match[2])
    return found


CONTRIBUTING = blocks("CONTRIBUTING.md")
README = blocks("README.md")
README_TEXT = (ROOT / "README.md").read_text(encoding="utf-8")


class Scratch:
    """A clone of this repository, with its uncommitted changes, and a person at its shell."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.desk = root.parent / "desk"
        self.desk.mkdir()
        editor = self.desk / "editor"
        editor.write_text(EDITOR)
        editor.chmod(0o755)
        (self.desk / "message").write_text(MESSAGE)
        (self.desk / "gitconfig").write_text(
            "[user]\n\tname = Ada Person\n\temail = ada@people.org\n"
        )

    def type(self, commands: str, todo: str = "") -> str:
        """Run a block of a document; what it printed."""
        mine = {
            "EDITOR": str(self.desk / "editor"),
            "MESSAGE": str(self.desk / "message"),
            "TODO": todo,
            "GIT_CONFIG_GLOBAL": str(self.desk / "gitconfig"),
            "MAKEFLAGS": "",
            "MAKELEVEL": "0",
        }
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", commands],
            cwd=self.root,
            env={k: v for k, v in os.environ.items() if not k.startswith("GIT_")} | mine,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=900,
            check=False,
        )
        assert done.returncode == 0, f"{commands}\n{done.stdout}"
        return done.stdout

    def series(self, line: str = LINE) -> list[str]:
        return (self.root / "patches" / line / "series").read_text().split()

    def pin(self, line: str) -> dict[str, dict[str, str]]:
        return tomllib.loads((self.root / "patches" / line / "upstream.toml").read_text())


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Scratch:
    """A clone in which what CONTRIBUTING says first was done."""
    if subprocess.run(["git", "rev-parse"], cwd=ROOT, capture_output=True, check=False).returncode:
        pytest.skip("not a git repository: there is nothing to clone")
    root = tmp_path_factory.mktemp("documents") / "project"
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(root)], check=True)
    diff = subprocess.run(["git", "diff", "--binary", "HEAD"], cwd=ROOT, check=True, stdout=-1)
    subprocess.run(["git", "apply", "--allow-empty"], cwd=root, check=True, input=diff.stdout)
    if (ROOT / "build/downloads").is_dir():
        (root / "build").mkdir()
        (root / "build/downloads").symlink_to(ROOT / "build/downloads")
    scratch = Scratch(root)
    scratch.type("git add --all && git commit --quiet --allow-empty --message=scratch")
    (commands,) = CONTRIBUTING["Set up"]
    scratch.type(commands)
    return scratch


@pytest.fixture
def scratch(clone: Scratch) -> Iterator[Scratch]:
    """The clone as it was when it was made."""
    yield clone
    clone.type("git reset --quiet --hard && git clean --quiet --force -d patches requirements")
    clone.type(".venv-tools/bin/python -m tools series apply --discard")


@pytest.mark.parametrize(
    ("section", "todo", "change"),
    [
        ("Editing a patch", "", lambda series: series),
        ("Adding a patch", "", lambda series: [*series, FRESH]),
        (
            "Splitting a patch",
            r"s/^pick \(.*Count routed experts\)$/edit \1/",
            lambda series: [n for name in series for n in ([FRESH] * (name == METRICS) + [name])],
        ),
        ("Reordering", "1{h;d};2G", lambda series: [series[1], series[0], *series[2:]]),
        (
            "Dropping a patch",
            "/the counts of rejected tokens/d",
            lambda series: [name for name in series if name != LAST],
        ),
    ],
)
def test_commands_change_the_series(
    scratch: Scratch, section: str, todo: str, change: Callable[[list[str]], list[str]]
) -> None:
    before = scratch.series()
    (commands,) = CONTRIBUTING[section]
    scratch.type(commands, todo)
    assert scratch.series() == change(before)
    changed = scratch.type("git status --porcelain").splitlines()
    assert any(line.endswith(".patch") for line in changed) or section == "Reordering"


def test_a_line_begins_with_another_lines_series(scratch: Scratch) -> None:
    try:
        Index().files("vllm")
    except ToolError as error:
        pytest.skip(str(error))
    (commands,) = CONTRIBUTING["Adding a line"]
    ((old, new),) = set(re.findall(r"FROM=(\S+) ON=(\S+)", commands))
    assert f"rebased: {len(scratch.series(old))} patches" in scratch.type(commands)
    assert scratch.pin(new)["release"]["version"] == new.removeprefix("v")
    assert (
        scratch.pin(new)["wheel"]["cpu"]["filename"] != scratch.pin(old)["wheel"]["cpu"]["filename"]
    )
    tools = f".venv-tools/bin/python -m tools --on {new}"
    scratch.type(f"{tools} series check")
    scratch.type(f"make wheel ON={new} && {tools} wheel verify")
    assert scratch.type("git status --porcelain").count("??") == 2


def test_sending_a_patch_makes_a_branch_and_pushes_nothing(scratch: Scratch) -> None:
    scratch.type(
        "git init --quiet --bare ../origin.git && git clone --quiet ../origin.git ../vllm && "
        f"git -C build/{LINE}/vllm push --quiet ../../../../origin.git "
        "refs/re/base:refs/heads/main && "
        "git -C ../vllm fetch --quiet"
    )
    (commands,) = CONTRIBUTING["Sending a patch to vLLM"]
    out = scratch.type(commands)
    assert "Nothing was pushed" in out
    made = scratch.type("git -C ../vllm log -1 --format='%an %s' cpu-router-bias")
    assert made.startswith("Ada Person [")
    assert scratch.type("git -C ../origin.git for-each-ref").count("\n") == 1


def test_the_first_commands_of_the_readme_build_a_wheel_and_prove_it(scratch: Scratch) -> None:
    serve, prove = README["First rows"]
    (command,) = re.findall("^make .*$", serve, re.MULTILINE)
    scratch.type(command.replace("PYTHON=python3.12", ""))
    assert list((scratch.root / "build" / LINE / "wheels-cuda").glob("vllm-*+re.*-*x86_64.whl"))
    # The whole suite, which this test is part of: that it can be run is what can be seen here.
    scratch.type(prove.replace("make test ", "make --dry-run test "))


def test_a_new_user_gets_rows(
    tmp_path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """README's first screen, with a small model and the CPU's wheel instead of the large ones."""
    port = free_port()

    def small(text: str) -> str:
        text = text.replace("Qwen/Qwen3-30B-A3B", str(checkpoint)).replace(":8000/", f":{port}/")
        return text.replace("wheels-cuda", "wheels").replace(".venv-server/bin/", "")

    *_, install, serve = small(README["First rows"][0]).splitlines()
    _, _, install = install.partition(" && ")
    (client,) = re.findall(r"```python\n(.*?)```", README_TEXT, re.DOTALL)
    serve += f" --kv-cache-memory-bytes 1G --port {port} --enforce-eager --dtype float32 "
    serve += " ".join(LINES[LINE].arguments)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    subprocess.run(["bash", "-euc", install], cwd=ROOT, check=True)
    # What the wheel of the tests needs, and the CUDA wheel does not.
    env = LINES[LINE].variables()
    command = ["bash", "-c", f"exec {serve}"]
    with Kept(command, tmp_path / "server.log", env=env, common=QUIET) as server:
        while server.poll() is None and "startup complete" not in server.tail(5):
            time.sleep(1)
        assert server.poll() is None, server.tail(40)
        done = subprocess.run(
            [sys.executable, "-c", small(client) + "print(rows.any(axis=(0, 2)).tolist())"],
            capture_output=True,
            text=True,
            check=False,
        )
    assert done.returncode == 0, done.stderr
    tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    (prompt,) = re.findall(r'prompt="(.*)"', client)
    rows, used = done.stdout.splitlines()
    # Sampled, at most 16 tokens of them: it may end sooner.
    lengths = range(len(tokenizer.encode(prompt).ids), len(tokenizer.encode(prompt).ids) + 16)
    assert rows in {str((length, 4, 4)) for length in lengths}
    assert used == str([True] * 4)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return make_checkpoint(tmp_path / "checkpoint")


def test_the_wheel_of_the_documents_is_installed_and_verified(scratch: Scratch) -> None:
    (commands,) = blocks("docs/wheel.md")["The wheel"]
    assert scratch.type(commands).count("verified: ") == 2
