# SPDX-License-Identifier: Apache-2.0
"""One patch file: its message, its headers, its diff."""

from __future__ import annotations

import email
import email.policy
import io
import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import PurePosixPath

from unidiff.errors import UnidiffParseError
from unidiff.patch import PatchSet

from tools.errors import LintProblem

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

_STATUS = re.compile(r"Upstream-Status: (\w+)(?: \[(\S[^\]]*)\])?")
# Lenient on purpose: a misspelt header is reported as malformed, not as missing.
_LIKE_STATUS = re.compile(r"\s*upstream[-_ ]*s\w*\s*[:=].*", re.IGNORECASE)
_LIKE_DROP = re.compile(r"\s*drop(?:ped)?[-_ ]*when\s*[:=].*", re.IGNORECASE)
_HEADER = re.compile(
    r"(?:Upstream-Status|Drop-when|Tests?|Link|Fixes|Bug|Origin|Forwarded|[A-Za-z-]+-by): .*",
    re.IGNORECASE,
)


def strip_prefix(subject: str) -> str:
    """The subject without what ``git format-patch`` put before it.

    >>> strip_prefix("[PATCH] [Core] Keep rows")
    '[Core] Keep rows'
    >>> strip_prefix("[PATCH 2/3] Keep rows")
    'Keep rows'
    """
    return re.sub(r"^\[PATCH[^\]]*\]\s*", "", subject)


def slug(subject: str) -> str:
    """A file name from a subject: tags left out, words joined by hyphens.

    >>> slug("[Core][MoE] Rows travel with their token")
    'rows-travel-with-their-token'
    >>> slug("[Bugfix] CPU: don't crash on `SYNTHETIC_MODE`")
    'cpu-dont-crash-on-synthetic-mode'
    >>> slug("[Core]")
    ''
    """
    words = re.sub(r"^(\s*\[[^\]]*\])+", "", subject).lower().replace("'", "")
    return re.sub(r"[^a-z0-9]+", "-", words).strip("-")


def leaves_tree(path: str) -> bool:
    """Whether a path of a diff, without its ``a/`` or ``b/``, is outside the tree or in ``.git``.

    >>> leaves_tree("vllm/envs.py")
    False
    >>> leaves_tree("vllm/../../etc/passwd"), leaves_tree("/etc/passwd"), leaves_tree(".git/config")
    (True, True, True)
    """
    parts = PurePosixPath(path).parts
    return path.startswith("/") or ".." in parts or any(p.lower() == ".git" for p in parts)


def parse_status(line: str) -> tuple[str, str | None] | None:
    """The status and its argument, or None where the line is malformed.

    >>> parse_status("Upstream-Status: Backport [0.21.0]")
    ('Backport', '0.21.0')
    >>> parse_status("Upstream-Status: Pending")
    ('Pending', None)
    >>> parse_status("Upstream-Status: Denied") is None  # says neither where nor why
    True
    >>> parse_status("upstream-status: pending") is None
    True
    """
    match = _STATUS.fullmatch(line.rstrip())
    if not match or match[1] not in STATUSES or (match[2] is None and match[1] != "Pending"):
        return None
    return match[1], match[2]


@dataclass(frozen=True)
class Patch:
    """A file of the series, as bytes; everything else is read off them."""

    name: str
    data: bytes

    @cached_property
    def _parts(self) -> tuple[bytes, bytes]:
        start = re.search(rb"^diff --git ", self.data, re.MULTILINE)
        at = start.start() if start else len(self.data)
        return self.data[:at], self.data[at:]

    @cached_property
    def _mail(self) -> email.message.EmailMessage:
        head = re.sub(rb"\AFrom [^\n]*\n", b"", self._parts[0])
        return email.message_from_bytes(head, policy=email.policy.default)

    @property
    def diff_bytes(self) -> bytes:
        return self._parts[1]

    @cached_property
    def subject(self) -> str:
        """Unfolded, without ``[PATCH]``."""
        return strip_prefix(" ".join(str(self._mail.get("Subject", "")).split()))

    @property
    def author(self) -> str:
        return str(self._mail.get("From", ""))

    @property
    def date(self) -> str:
        return str(self._mail.get("Date", ""))

    @cached_property
    def body(self) -> str:
        payload = self._mail.get_payload(decode=True)
        text = payload.decode("utf-8", "replace") if isinstance(payload, bytes) else ""
        return re.split(r"^---$", text, maxsplit=1, flags=re.MULTILINE)[0]

    @cached_property
    def status(self) -> str:
        """The status as it stands in the header, or ``?``."""
        for line in self.body.splitlines():
            if parsed := parse_status(line):
                return parsed[0] if parsed[1] is None else f"{parsed[0]} [{parsed[1]}]"
        return "?"

    @cached_property
    def diff(self) -> PatchSet:
        text = self.diff_bytes.decode("utf-8", "surrogateescape")
        try:
            return PatchSet(io.StringIO(text, newline="\n"))
        except UnidiffParseError as error:
            raise LintProblem(
                "the diff cannot be read",
                where=self.name,
                found=str(error).strip(),
                next_step="restore the patch, or write it anew: python -m tools series export",
            ) from error

    @cached_property
    def blobs(self) -> dict[str, tuple[str, str]]:
        """Blob ids before and after, by path, as the diff's own ``index`` lines state them."""
        found: dict[str, tuple[str, str]] = {}
        for file in self.diff:
            for line in file.patch_info or ():
                if match := re.match(r"index ([0-9a-f]+)\.\.([0-9a-f]+)", line):
                    found[file.path] = (match[1], match[2])
        return found


def check_patch(patch: Patch) -> list[LintProblem]:
    """Every rule that the patch breaks; one function a rule."""
    try:
        list(patch.diff)
    except LintProblem as problem:
        return [problem]
    return [
        *check_subject(patch),
        *check_status(patch),
        *check_drop(patch),
        *check_sign_off(patch),
        *check_body(patch),
        *check_paths(patch),
        *check_blanks(patch),
    ]


def check_subject(patch: Patch) -> list[LintProblem]:
    if slug(patch.subject):
        return []
    return [
        LintProblem(
            "the patch has no subject",
            where=patch.name,
            found=patch.subject or "nothing",
            expected="Subject: [PATCH] [Area] What it adds",
            next_step=_REWORD,
        )
    ]


_REWORD = "reword the commit (git -C build/vllm rebase -i refs/re/base), then: series export"


def check_status(patch: Patch) -> list[LintProblem]:
    lines = [line for line in patch.body.splitlines() if _LIKE_STATUS.fullmatch(line)]
    expected = "Upstream-Status: " + "\n            or: ".join(STATUSES.values())
    if not lines:
        what, found = "Upstream-Status is missing", "no such line"
    elif len(lines) > 1:
        what, found = "Upstream-Status stands more than once", " / ".join(lines)
    elif parse_status(lines[0]) is None:
        what, found = "Upstream-Status is malformed", lines[0]
    else:
        return []
    return [LintProblem(what, where=patch.name, found=found, expected=expected, next_step=_REWORD)]


def check_drop(patch: Patch) -> list[LintProblem]:
    lines = [line for line in patch.body.splitlines() if _LIKE_DROP.fullmatch(line)]
    if any(re.fullmatch(r"Drop-when: \S.*", line) for line in lines):
        return []
    return [
        LintProblem(
            "Drop-when is malformed" if lines else "Drop-when is missing",
            where=patch.name,
            found=lines[0] if lines else "no such line",
            expected="Drop-when: the condition under which nobody needs the patch",
            next_step=_REWORD,
        )
    ]


def check_sign_off(patch: Patch) -> list[LintProblem]:
    lines = [
        line
        for line in patch.body.splitlines()
        if line.lower().replace(" ", "").startswith(("signed-off-by:", "signedoffby:"))
    ]
    if f"Signed-off-by: {IDENTITY}" in lines:
        return []
    return [
        LintProblem(
            "the project's Signed-off-by is missing",
            where=patch.name,
            found=" / ".join(lines) or "no such line",
            expected=f"Signed-off-by: {IDENTITY}",
            next_step="git -C build/vllm rebase --signoff refs/re/base, then: series export",
        )
    ]


def check_body(patch: Patch) -> list[LintProblem]:
    if any(line.strip() and not _HEADER.fullmatch(line) for line in patch.body.splitlines()):
        return []
    return [
        LintProblem(
            "the message has no body",
            where=patch.name,
            found="only a subject and headers",
            expected="why the patch is needed and what a user sees",
            next_step=_REWORD,
        )
    ]


def check_paths(patch: Patch) -> list[LintProblem]:
    if not patch.diff:
        return [
            LintProblem(
                "the patch changes nothing",
                where=patch.name,
                found="no diff",
                expected="at least one changed file",
                next_step="drop the commit, then: series export",
            )
        ]
    found = []
    for file in patch.diff:
        names = {re.sub(r"^[ab]/", "", name) for name in (file.source_file, file.target_file)}
        for line in file.patch_info or ():
            if match := re.match(r"(?:rename|copy) (?:from|to) (.*)", line.rstrip("\n")):
                names.add(match[1])
            elif match := re.match(r"diff --git a/(.*) b/(.*)", line.rstrip("\n")):
                names.update(match.groups())
        for name in sorted(names - {"/dev/null"}):
            if leaves_tree(name.strip('"')):
                found.append(("a path leaves the tree", name, "a path below the tree"))
        if file.is_binary_file:
            found.append(("a binary file is changed", file.path, "text"))
        if file.is_symlink or file.is_submodule:
            found.append(("a link is changed", file.path, "a regular file"))
    return [
        LintProblem(
            what,
            where=patch.name,
            found=name,
            expected=expected,
            next_step="take that file out of the commit, then: series export",
        )
        for what, name, expected in found
    ]


def check_blanks(patch: Patch) -> list[LintProblem]:
    before = patch.data[: len(patch.data) - len(patch.diff_bytes)].count(b"\n")
    bad = [
        f"{patch.name}:{before + (line.diff_line_no or 0)} ({file.path}:{line.target_line_no})"
        for file in patch.diff
        for hunk in file
        for line in hunk
        if line.is_added and re.search(r"[ \t\r\f\v]+\n?\Z", line.value)
    ]
    if not bad:
        return []
    return [
        LintProblem(
            "added lines end in blanks",
            where=patch.name,
            found=", ".join(bad),
            expected="no blank at the end of an added line",
            next_step="remove them in the commit, then: series export",
        )
    ]
