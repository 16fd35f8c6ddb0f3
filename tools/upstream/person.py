# SPDX-License-Identifier: Apache-2.0
"""The person who signs off a patch."""

import os
import re
import subprocess
from email.utils import parseaddr
from pathlib import Path
from typing import NamedTuple

from tools.common.errors import ToolError
from tools.series.patch import PROJECT_EMAIL, PROJECT_NAME

# Names that RFC 2606 and 6761 set aside: nobody reads mail there.
_RESERVED = re.compile(r"(.*\.)?(example(\.\w+)?|invalid|test|localhost|local)", re.IGNORECASE)
_NOBODY = {"", "root", "user", "nobody", "unknown", "your name", "you", PROJECT_NAME.lower()}


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
