# SPDX-License-Identifier: Apache-2.0
"""One patch file: its message, its headers, its diff."""

import email
import email.policy
import io
import re
from dataclasses import dataclass
from functools import cached_property

from unidiff.errors import UnidiffParseError
from unidiff.patch import PatchSet

from tools.common.cli import ToolError

PROJECT_NAME = "vLLM routed experts"
PROJECT_EMAIL = "patches@vllm-routed-experts.invalid"
IDENTITY = f"{PROJECT_NAME} <{PROJECT_EMAIL}>"
# What may stand after "Upstream-Status:", and what its argument says.
STATUSES = {
    "Pending": "Pending [why it was not sent yet] (the reason may be left out)",
    "Submitted": "Submitted [where: a link]",
    "Backport": "Backport [the upstream commit or release]",
    "Denied": "Denied [where, and why it is kept]",
    "Inappropriate": "Inappropriate [why upstream would not want it]",
}
STATUS = re.compile(rf"Upstream-Status: (?:Pending|(?:{'|'.join(STATUSES)}) \[\S[^\]]*\])")
# Headers that only the series reads; upstream gets the message without them.
OWN_HEADER = re.compile(r"(?:Upstream-Status|Drop-when|Needs):")
# The last line of a commit's message in the build tree. The file itself does not have it.
FILENAME = re.compile(rb"^Patch-Filename: ([\w.-]+\.patch)\n?", re.MULTILINE)


def slug(subject: str) -> str:
    """A file name from a subject: tags left out, words joined by hyphens.

    >>> slug("[Bugfix][MoE] CPU: don't crash on `SYNTHETIC_MODE`")
    'cpu-dont-crash-on-synthetic-mode'
    >>> slug("[Core]")
    ''
    """
    words = re.sub(r"^(\s*\[[^\]]*\])+", "", subject).lower().replace("'", "")
    return re.sub(r"[^a-z0-9]+", "-", words).strip("-")


@dataclass(frozen=True)
class Patch:
    """A file of the series; everything else is read from its bytes."""

    name: str
    data: bytes

    @property
    def mail(self) -> bytes:
        """What ``git am`` gets: the patch with its name as the last line of the message."""
        name = f"\nPatch-Filename: {self.name}\n\n".encode()
        return re.sub(rb"\n+(?=---\n|diff --git )", lambda _: name, self.data, count=1)

    @cached_property
    def diff_bytes(self) -> bytes:
        start = re.search(rb"^diff --git ", self.data, re.MULTILINE)
        return self.data[start.start() :] if start else b""

    @cached_property
    def _mail(self) -> email.message.EmailMessage:
        head = self.data[: len(self.data) - len(self.diff_bytes)]
        return email.message_from_bytes(head, policy=email.policy.default)

    @cached_property
    def subject(self) -> str:
        """Unfolded, without what ``git format-patch`` put before it."""
        text = " ".join(str(self._mail.get("Subject", "")).split())
        return re.sub(r"^\[PATCH[^\]]*\]\s*", "", text)

    @cached_property
    def body(self) -> str:
        payload = self._mail.get_payload(decode=True)
        text = payload.decode("utf-8", "replace") if isinstance(payload, bytes) else ""
        return re.split(r"^---$", text, maxsplit=1, flags=re.MULTILINE)[0]

    @cached_property
    def status(self) -> str:
        """The status as it stands in the header, or ``?``."""
        found = filter(STATUS.fullmatch, map(str.rstrip, self.body.splitlines()))
        return next(found, "Upstream-Status: ?").removeprefix("Upstream-Status: ")

    @cached_property
    def needs(self) -> tuple[str, ...]:
        """The earlier patches that ``Needs:`` headers name, without what these need."""
        lines = re.findall(r"^Needs:(.*)", self.body, re.MULTILINE)
        return tuple(filter(None, re.split(r"[,\s]+", " ".join(lines))))

    @cached_property
    def diff(self) -> PatchSet:
        text = self.diff_bytes.decode("utf-8", "surrogateescape")
        try:
            return PatchSet(io.StringIO(text, newline="\n"))
        except UnidiffParseError as error:
            what, said = "the diff cannot be read", str(error).strip()
            step = "restore the patch, or rewrite it: python -m tools series export"
            raise ToolError(what, self.name, found=said, next_step=step) from error


def check_files(patch: Patch) -> list[ToolError]:
    """What a patch may not change. Paths outside the tree are refused by git."""
    found = [] if patch.diff else [("the patch changes nothing", "no diff", "a changed file")]
    for file in patch.diff:
        if file.is_binary_file:
            found.append(("a binary file is changed", file.path, "text"))
        if file.is_symlink or file.is_submodule:
            found.append(("a link is changed", file.path, "a regular file"))
    step = "take that file out of the commit" if patch.diff else "drop the commit"
    step += ", then: series export"
    return [ToolError(what, patch.name, expected, name, step) for what, name, expected in found]
