# SPDX-License-Identifier: Apache-2.0
"""Git runs as if the machine had no user."""

from pathlib import Path

import pytest

from tools.common.git import Git, environment


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Git:
    home = tmp_path / "home"
    home.mkdir()
    (home / ".gitconfig").write_text("[user]\n\tname = Somebody\n")
    (home / "git").mkdir()
    (home / "git/config").write_text("[user]\n\temail = some@body\n")
    (home / "system").write_text("[core]\n\tpager = something\n")
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(home))
    monkeypatch.setenv("GIT_CONFIG_SYSTEM", str(home / "system"))
    monkeypatch.setenv("GIT_DIR", str(home))
    path = tmp_path / "repository"
    path.mkdir()
    git = Git(path)
    git.init("main")
    return git


def test_no_setting_of_user_or_system_is_seen(repository: Git) -> None:
    origins = repository.text("config", "--list", "--show-scope").splitlines()
    assert origins
    assert {line.split("\t")[0] for line in origins} == {"command", "local"}


def test_no_git_variable_of_the_caller_is_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIT_ANYTHING", "something")
    monkeypatch.setenv("LD_SOMETHING", "something")
    assert "something" not in environment().values()


def test_a_repository_is_the_named_directory_not_the_callers(repository: Git) -> None:
    assert repository.text("rev-parse", "--show-toplevel") == str(repository.path.resolve())


def test_contents_come_back_as_they_went_in(repository: Git) -> None:
    wanted = [b"", b"\n", b"one\r\ntwo", bytes(range(256))]
    blobs = []
    for data in wanted:
        done = repository.run("hash-object", "-w", "--stdin", stdin=data)
        blobs.append(done.stdout.decode().strip())
    assert list(repository.contents([*blobs, blobs[0]]).values()) == wanted
