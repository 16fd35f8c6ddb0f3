# SPDX-License-Identifier: Apache-2.0
"""A patch: message, headers, diff; and ``patches/<line>/series``, the list of all patches."""

import email
import email.policy
import hashlib
import io
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from unidiff.patch import PatchSet

from tools.common.cli import ToolError
from tools.common.pin import Pin

PROJECT_NAME = "vLLM routed experts"
PROJECT_EMAIL = "patches@vllm-routed-experts.invalid"
IDENTITY = f"{PROJECT_NAME} <{PROJECT_EMAIL}>"
STATUSES = ("Pending", "Submitted", "Backport", "Denied", "Inappropriate")
STATUS = re.compile(rf"Upstream-Status: (?:Pending|(?:{'|'.join(STATUSES)}) \[\S[^\]]*\])")
# For each header: the pattern of a correct line, and the text to show.
HEADERS = {
    "Upstream-Status": (STATUS.pattern, f"{' or '.join(STATUSES)} [where or why]"),
    "Drop-when": (r"Drop-when: \S.*", "the condition under which nobody needs the patch"),
    "Needs": (
        r"Needs: [^,\s]+\.patch(?:, [^,\s]+\.patch)*",
        "one.patch, another.patch (or no such line)",
    ),
}
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
        return PatchSet(io.StringIO(text, newline="\n"))


# Patches in order.
Series = tuple[Patch, ...]


def choose(series: Series, names: Iterable[str]) -> list[Patch]:
    """The named patches in the order of the series; ``.patch`` may be left out of a name."""
    wanted = {f"{name.removesuffix('.patch')}.patch" for name in names}
    if unknown := wanted - {patch.name for patch in series}:
        expected = "one of: " + ", ".join(patch.name for patch in series)
        found = ", ".join(sorted(unknown))
        raise ToolError("the series has no such patch", expected=expected, found=found)
    return [patch for patch in series if patch.name in wanted]


def with_needs(patches: Iterable[Patch], names: Iterable[str]) -> list[str]:
    """The named patches and all that they need, directly or through others, in order."""
    known = {patch.name: patch for patch in patches}
    found, more = set[str](), set(names)
    while more:
        found |= more
        more = {need for name in more for need in known[name].needs} - found
    return [name for name in known if name in found]


def fingerprint(series: Series, pin: Pin) -> str:
    """One sha256 over the pin's source, the order of the series and every byte of it."""
    total = hashlib.sha256(f"source {pin.source.sha256}\n".encode())
    for patch in series:
        total.update(f"{hashlib.sha256(patch.data).hexdigest()}  {patch.name}\n".encode())
    return total.hexdigest()


def read_series(series_file: Path) -> Series:
    """Read the series; refuse a list with mistakes."""
    try:
        names = list(filter(None, series_file.read_text(encoding="utf-8").splitlines()))
    except FileNotFoundError:
        step = "restore it (git checkout patches), or make it: series export"
        raise ToolError("there is no series file", series_file, next_step=step) from None
    there = {path.name for path in series_file.parent.glob("*.patch")}
    if bad := [name for name in names if name not in there or names.count(name) > 1]:
        expected, found = "each line names another patch beside it", ", ".join(dict.fromkeys(bad))
        raise ToolError("the list of patches is wrong", series_file, expected, found)
    return tuple(Patch(name, (series_file.parent / name).read_bytes()) for name in names)
