# SPDX-License-Identifier: Apache-2.0
"""One small method for each git act, free of the caller's configuration and environment.

Nothing here knows about vLLM, pins or series.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tools.common.errors import FailedCommand, ToolError

# The same bytes must come out on every machine, so nothing of the user's set-up may get in.
_SETTINGS = {
    "core.hooksPath": "/dev/null",  # no hook of a template or of the repository runs
    "core.fsmonitor": "false",
    "core.autocrlf": "false",  # bytes in the tree are bytes in the file
    "core.eol": "lf",
    "core.safecrlf": "false",
    "core.quotePath": "true",  # one spelling of unusual paths in diffs
    "core.abbrev": "40",
    "commit.gpgSign": "false",
    "gc.auto": "0",
    "rerere.enabled": "false",
    "i18n.commitEncoding": "UTF-8",
    "i18n.logOutputEncoding": "UTF-8",
    "apply.whitespace": "nowarn",
    "apply.ignoreWhitespace": "no",
    "protocol.file.allow": "always",  # a fetch from the submodule's own directory
    "advice.detachedHead": "false",
}


def environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """The whole environment of a git process: no GIT_* and no home of the caller."""
    return {
        "PATH": os.environ.get("PATH", os.defpath),
        "LC_ALL": "C",
        "TZ": "UTC",
        "HOME": os.devnull,
        "XDG_CONFIG_HOME": os.devnull,
        "GIT_CONFIG_NOSYSTEM": "1",
        "GIT_CONFIG_SYSTEM": os.devnull,
        "GIT_CONFIG_GLOBAL": os.devnull,
        "GIT_ATTR_NOSYSTEM": "1",
        "GIT_TERMINAL_PROMPT": "0",
        "GIT_EDITOR": "false",
        "GIT_OPTIONAL_LOCKS": "0",  # looking at a repository does not write into it
        **(extra or {}),
    }


@dataclass(frozen=True)
class Entry:
    """A file in a tree: its mode as git writes it, and its blob id."""

    mode: str
    blob: str


@dataclass(frozen=True)
class Change:
    """One line of a raw diff: status letter, path, blob ids before and after."""

    status: str
    path: str
    before: str
    after: str


class Git:
    """A repository with a work tree at ``path``."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def run(
        self,
        *arguments: str,
        stdin: bytes | None = None,
        env: Mapping[str, str] | None = None,
        accept: Sequence[int] = (0,),
    ) -> subprocess.CompletedProcess[bytes]:
        """Run one git command; any exit status that is not accepted raises FailedCommand."""
        settings = [part for key, value in _SETTINGS.items() for part in ("-c", f"{key}={value}")]
        # The tree was named by the user, so its owner is no reason to refuse it.
        settings += ["-c", f"safe.directory={self.path.resolve()}"]
        done = subprocess.run(
            ["git", *settings, *arguments],
            cwd=self.path,
            env=environment(env),
            input=stdin if stdin is not None else b"",
            capture_output=True,
            check=False,
        )
        if done.returncode not in accept:
            output = (done.stdout + done.stderr).decode(errors="replace")
            shown = ["git", "-C", str(self.path), *arguments]
            raise FailedCommand(shown, done.returncode, output)
        return done

    def text(self, *arguments: str, env: Mapping[str, str] | None = None) -> str:
        return self.run(*arguments, env=env).stdout.decode().strip()

    def init(self, branch: str) -> None:
        self.run(
            "init", "--quiet", "--template=", "--object-format=sha1", f"--initial-branch={branch}"
        )

    def commit_id(self, revision: str) -> str | None:
        """The commit that a revision names, or None."""
        done = self.run(
            "rev-parse", "--verify", "--quiet", f"{revision}^{{commit}}", accept=(0, 1, 128)
        )
        return done.stdout.decode().strip() or None

    def tree_id(self, revision: str) -> str:
        return self.text("rev-parse", "--verify", f"{revision}^{{tree}}")

    def current_branch(self) -> str | None:
        """The branch that HEAD is on, or None when it is detached."""
        done = self.run("symbolic-ref", "--quiet", "--short", "HEAD", accept=(0, 1))
        return done.stdout.decode().strip() or None

    def dirt(self) -> list[str]:
        """Status lines of everything that is changed or untracked; empty means clean."""
        out = self.run("status", "--porcelain", "--untracked-files=all").stdout.decode()
        return out.splitlines()

    def refuse_dirt(self, what: str) -> None:
        """Raise an error that begins with ``what`` unless the work tree is clean."""
        if dirt := self.dirt():
            raise ToolError(
                what,
                where=self.path,
                found=f"{len(dirt)} changed or untracked files",
                next_step=f"commit or stash them: git -C {self.path} status",
                details=dirt[:20],
            )

    def commits(self, *revisions: str) -> list[str]:
        """Commit ids, oldest first."""
        return self.text("rev-list", "--reverse", "--topo-order", *revisions).split()

    def differs(self, *arguments: str) -> bool:
        """Whether ``git diff`` with these arguments shows anything."""
        return self.run("diff", "--quiet", *arguments, accept=(0, 1)).returncode != 0

    def subject(self, commit: str) -> str:
        return self.text("log", "-1", "--format=%s", commit)

    def parents(self, commit: str) -> list[str]:
        return self.text("rev-list", "--parents", "--max-count=1", commit).split()[1:]

    def message(self, commit: str) -> str:
        return self.run("log", "-1", "--format=%B", commit).stdout.decode()

    def oneline(self, commit: str) -> str:
        return self.text("log", "-1", "--abbrev=12", "--format=%h %s", commit)

    def files(self, revision: str, *under: str) -> dict[str, Entry]:
        """Every file of a tree, by path."""
        out = self.run("ls-tree", "-r", "-z", "--full-tree", revision, "--", *under).stdout
        found = {}
        for row in out.split(b"\0"):
            if row:
                facts, path = row.split(b"\t", 1)
                mode, _, blob = facts.decode().split()
                found[path.decode(errors="surrogateescape")] = Entry(mode, blob)
        return found

    def contents(self, blobs: Iterable[str]) -> dict[str, bytes]:
        """The bytes of many blobs from one process."""
        wanted = list(dict.fromkeys(blobs))
        out = self.run("cat-file", "--batch", stdin="".join(f"{b}\n" for b in wanted).encode())
        data, at, found = out.stdout, 0, {}
        for blob in wanted:
            end = data.index(b"\n", at)
            size = int(data[at:end].split()[-1])
            found[blob] = data[end + 1 : end + 1 + size]
            at = end + 1 + size + 1
        return found

    def changes(self, before: str, after: str) -> list[Change]:
        """What differs between two trees, renames shown as delete and add."""
        out = self.run(
            "diff-tree", "-r", "-z", "--raw", "--no-abbrev", "--no-renames", before, after
        ).stdout.decode(errors="surrogateescape")
        parts = out.split("\0")
        found = []
        for facts, path in zip(parts[0::2], parts[1::2], strict=False):
            _, _, old, new, status = facts.lstrip(":").split()
            found.append(Change(status, path, old, new))
        return found
