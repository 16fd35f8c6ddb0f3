# SPDX-License-Identifier: Apache-2.0
"""Git, free of the caller's configuration and environment. Nothing here knows about vLLM."""

import os
import shlex
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from tools.common.cli import ToolError

# The caller's own configuration is not read (see below); a clone of a person has one too.
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
# Beside PATH, the whole environment of a git process: no GIT_* and no home of the caller.
_ENVIRONMENT = {
    "LC_ALL": "C",
    "TZ": "UTC",
    "HOME": os.devnull,
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_ATTR_NOSYSTEM": "1",
    "GIT_TERMINAL_PROMPT": "0",
    "GIT_EDITOR": "false",
    "GIT_OPTIONAL_LOCKS": "0",  # reading a repository does not write into it
}


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
        whole = {"PATH": os.environ.get("PATH", os.defpath), **_ENVIRONMENT, **(env or {})}
        done = subprocess.run(command, cwd=self.path, env=whole, input=stdin, capture_output=True)
        if done.returncode not in accept:
            what = f"a command failed with exit status {done.returncode}"
            shown = shlex.join(["git", "-C", str(self.path), *arguments])
            output = (done.stdout + done.stderr).decode(errors="replace")
            raise ToolError(what, details=[f"$ {shown}", *output.splitlines()])
        return done

    def text(self, *arguments: str, accept: Sequence[int] = (0,)) -> str:
        return self.run(*arguments, accept=accept).stdout.decode(errors="replace").strip()

    def fetch(self, source: Path, *what: str) -> None:
        """Get commits of a repository on this machine: options of ``git fetch``, and refs."""
        self.run("fetch", "--quiet", "--no-tags", source.resolve().as_uri(), *what)

    def commit_id(self, revision: str) -> str | None:
        """The commit that a revision names, or None."""
        words = ("rev-parse", "--verify", "--quiet", f"{revision}^{{commit}}")
        return self.text(*words, accept=(0, 1, 128)) or None

    def tree_id(self, revision: str) -> str:
        return self.text("rev-parse", "--verify", f"{revision}^{{tree}}")

    def dirt(self) -> list[str]:
        """Status lines of everything that is changed or untracked; empty means clean."""
        out = self.run("status", "--porcelain", "--untracked-files=all").stdout
        return out.decode().splitlines()

    def commits(self, *revisions: str) -> list[str]:
        """Commit ids, oldest first."""
        return self.text("rev-list", "--reverse", "--topo-order", *revisions).split()

    def log(self, commit: str, form: str = "%h %s") -> str:
        """One commit in a format of ``git log``."""
        return self.text("log", "-1", "--abbrev=12", f"--format={form}", commit)

    def _names(self, command: str, *arguments: str) -> list[str]:
        out = self.run(command, "-z", "--name-only", *arguments).stdout
        return out.decode(errors="surrogateescape").split("\0")[:-1]

    def files(self, revision: str, *under: str) -> list[str]:
        """Every file of a tree."""
        return self._names("ls-tree", "-r", "--full-tree", revision, "--", *under)

    def changed(self, *arguments: str) -> list[str]:
        """The files that ``git diff`` with these arguments shows; a renamed file has two names."""
        return self._names("diff", "--no-renames", *arguments)
