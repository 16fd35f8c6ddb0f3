# SPDX-License-Identifier: Apache-2.0
"""A person's clone of vLLM, refs in it, and the person who signs off a patch."""

import os
import re
import subprocess
from email.utils import parseaddr
from pathlib import Path
from typing import NamedTuple

from tools.common.errors import ToolError
from tools.common.git import Git
from tools.series.patch import PROJECT_EMAIL, PROJECT_NAME

# Names that RFC 2606 and 6761 set aside: nobody reads mail there.
_RESERVED = re.compile(r"(.*\.)?(example(\.\w+)?|invalid|test|localhost|local)", re.IGNORECASE)
_NOBODY = {"", "root", "user", "nobody", "unknown", "your name", "you", PROJECT_NAME.lower()}


def open_clone(path: Path) -> Git:
    """The repository at ``path``, which must be the top directory of a clone."""
    if not (path / ".git").exists():
        raise ToolError(
            "this is not a clone of vLLM",
            where=path,
            expected="a directory with .git",
            next_step="name the top directory of a clone: --clone <path>",
        )
    return Git(path)


def resolve(git: Git, ref: str) -> str:
    """The commit that a ref of the clone names; ``1.2.3`` may name the tag ``v1.2.3``."""
    found = None if ref.startswith("-") else git.commit_id(ref) or git.commit_id(f"v{ref}")
    if found is None:
        raise ToolError(
            "the clone has no such ref",
            where=git.path,
            expected="a tag, a branch or a commit",
            found=ref,
            next_step=f"fetch it: git -C {git.path} fetch --tags origin",
        )
    return found


class Person(NamedTuple):
    """Who signs off and sends."""

    name: str
    email: str

    def __str__(self) -> str:
        return f"{self.name} <{self.email}>"


def find_person(repository: Path) -> Person:
    """The identity that git would commit with in a repository; a placeholder is refused."""
    # The user's own configuration, which the tools read nowhere else.
    settings = {k: v for k, v in os.environ.items() if not k.startswith("GIT_") or "CONFIG" in k}
    command = ["git", "-C", str(repository), "config", "--get"]
    name, email = (
        subprocess.run([*command, key], env=settings, capture_output=True, text=True).stdout.strip()
        for key in ("user.name", "user.email")
    )
    domain = email.rpartition("@")[2]
    problem = None
    if name.lower() in _NOBODY:
        problem = f"user.name is {name!r}"
    elif email != parseaddr(f"x <{email}>")[1] or "." not in domain or _RESERVED.fullmatch(domain):
        problem = f"user.email is {email!r}"
    elif email == PROJECT_EMAIL:
        problem = f"user.email is that of the series, {email!r}"
    if problem:
        raise ToolError(
            "a sign-off is a person's, and git knows no person here",
            where=repository,
            expected="the name and the address of who answers for the patch",
            found=problem,
            next_step="git config --global user.name '...'; git config --global user.email '...'",
        )
    return Person(name, email)
