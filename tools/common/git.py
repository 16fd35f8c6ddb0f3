# SPDX-License-Identifier: Apache-2.0
"""Git, free of the caller's configuration and environment. Nothing here knows about vLLM."""

import io
import os
import shlex
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from tools.common.cli import ToolError

# The caller's own configuration is not read (see environment); a clone of a person has one too.
_SETTINGS = {
    "core.hooksPath": "/dev/null",  # no hook of a template or of the repository runs
    "core.abbrev": "40",
    "commit.gpgSign": "false",
    "gc.auto": "0",
    "rerere.enabled": "false",
    "merge.conflictStyle": "diff3",  # shows the lines before both changes too
    "protocol.file.allow": "always",  # a fetch from another directory of this machine
}
_ARGUMENTS = [part for key, value in _SETTINGS.items() for part in ("-c", f"{key}={value}")]


def environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """The whole environment of a git process: no GIT_* and no home of the caller."""
    nowhere = ("HOME", "XDG_CONFIG_HOME", "GIT_CONFIG_SYSTEM", "GIT_CONFIG_GLOBAL")
    return {
        "PATH": os.environ.get("PATH", os.defpath),
        "LC_ALL": "C",
        "TZ": "UTC",
        **dict.fromkeys(nowhere, os.devnull),
        "GIT_CONFIG_NOSYSTEM": "1",
        "GIT_ATTR_NOSYSTEM": "1",
        "GIT_TERMINAL_PROMPT": "0",
        "GIT_EDITOR": "false",
        "GIT_OPTIONAL_LOCKS": "0",  # reading a repository does not write into it
        **(extra or {}),
    }


class Change(NamedTuple):
    """One line of a raw diff: path, blob ids before and after, status letter."""

    path: str
    before: str
    after: str
    status: str


class Git:
    """A repository with a work tree at ``path``."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def run(
        self,
        *arguments: str,
        stdin: bytes = b"",
        env: Mapping[str, str] | None = None,
        accept: Sequence[int] = (0,),
    ) -> subprocess.CompletedProcess[bytes]:
        """Run one git command; any exit status that is not accepted raises ToolError."""
        # The user named this tree: accept it whoever owns it.
        safe = ("-c", f"safe.directory={self.path.resolve()}")
        command = ["git", *_ARGUMENTS, *safe, *arguments]
        done = subprocess.run(
            command, cwd=self.path, env=environment(env), input=stdin, capture_output=True
        )
        if done.returncode not in accept:
            what = f"a command failed with exit status {done.returncode}"
            shown = shlex.join(["git", "-C", str(self.path), *arguments])
            output = (done.stdout + done.stderr).decode(errors="replace")
            raise ToolError(what, details=[f"$ {shown}", *output.splitlines()])
        return done

    def text(self, *arguments: str, accept: Sequence[int] = (0,)) -> str:
        return self.run(*arguments, accept=accept).stdout.decode(errors="replace").strip()

    def init(self, branch: str) -> None:
        self.run("init", "-q", "--template=", "--object-format=sha1", f"--initial-branch={branch}")

    def fetch(self, source: Path, *what: str) -> None:
        """Get commits of a repository on this machine: options of ``git fetch``, and refs."""
        self.run("fetch", "--quiet", "--no-tags", source.resolve().as_uri(), *what)

    def commit_id(self, revision: str) -> str | None:
        """The commit that a revision names, or None."""
        words = ("rev-parse", "--verify", "--quiet", f"{revision}^{{commit}}")
        return self.text(*words, accept=(0, 1, 128)) or None

    def tree_id(self, revision: str) -> str:
        return self.text("rev-parse", "--verify", f"{revision}^{{tree}}")

    def current_branch(self) -> str | None:
        """The branch that HEAD is on, or None when it is detached."""
        return self.text("symbolic-ref", "--quiet", "--short", "HEAD", accept=(0, 1)) or None

    def dirt(self) -> list[str]:
        """Status lines of everything that is changed or untracked; empty means clean."""
        out = self.run("status", "--porcelain", "--untracked-files=all").stdout
        return out.decode().splitlines()

    def refuse_dirt(self, what: str) -> None:
        """Raise an error that begins with ``what`` unless the work tree is clean."""
        if dirt := self.dirt():
            step = f"commit or stash them: git -C {self.path} status"
            raise ToolError(what, where=self.path, next_step=step, details=dirt[:20])

    def commits(self, *revisions: str) -> list[str]:
        """Commit ids, oldest first."""
        return self.text("rev-list", "--reverse", "--topo-order", *revisions).split()

    def differs(self, *arguments: str) -> bool:
        """Whether ``git diff`` with these arguments shows anything."""
        return self.run("diff", "--quiet", *arguments, accept=(0, 1)).returncode != 0

    def unmerged(self) -> list[str]:
        """The files in conflict."""
        return self.text("diff", "--name-only", "--diff-filter=U").splitlines()

    def log(self, commit: str, form: str = "%h %s") -> str:
        """One commit in a format of ``git log``."""
        return self.text("log", "-1", "--abbrev=12", f"--format={form}", commit)

    def subject(self, commit: str) -> str:
        return self.log(commit, "%s")

    def files(self, revision: str, *under: str) -> dict[str, str]:
        """The blob ids of every file of a tree, by path."""
        out = self.run("ls-tree", "-r", "-z", "--full-tree", revision, "--", *under).stdout
        rows = out.decode(errors="surrogateescape").split("\0")[:-1]
        pairs = (row.split("\t", 1) for row in rows)
        return {path: facts.split()[2] for facts, path in pairs}

    def read(self, revision: str, path: str) -> bytes | None:
        """The bytes of one file of a tree; None where it has no such file."""
        done = self.run("cat-file", "blob", f"{revision}:{path}", accept=(0, 128))
        return done.stdout if done.returncode == 0 else None

    def contents(self, blobs: Iterable[str]) -> dict[str, bytes]:
        """The bytes of many blobs from one process."""
        wanted = list(dict.fromkeys(blobs))
        data = self.run("cat-file", "--batch", stdin="".join(f"{b}\n" for b in wanted).encode())
        out, found = io.BytesIO(data.stdout), {}
        for blob in wanted:
            found[blob] = out.read(int(out.readline().split()[-1]))
            out.readline()
        return found

    def changes(self, before: str, after: str) -> list[Change]:
        """What differs between two trees, renames shown as delete and add."""
        options = ("-r", "-z", "--raw", "--no-abbrev", "--no-renames")
        out = self.run("diff-tree", *options, before, after).stdout
        parts = out.decode(errors="surrogateescape").split("\0")
        pairs = zip(parts[0::2], parts[1::2], strict=False)
        return [Change(path, *facts.split()[2:]) for facts, path in pairs]
