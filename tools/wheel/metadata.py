# SPDX-License-Identifier: Apache-2.0
"""The few lines of a wheel that name it: each rewritten in place, the rest left as it is."""

from __future__ import annotations

import re

from packaging.tags import parse_tag
from packaging.version import Version

from tools.common.errors import ToolError


def _replace(what: str, text: str, pattern: str, line: str) -> str:
    """Replace the one line that matches."""
    new, count = re.subn(pattern, lambda _: line, text, flags=re.MULTILINE)
    if count != 1:
        raise ToolError(
            f"{what} of the base wheel is not as expected",
            expected=f"one line like {pattern}",
            found=f"{count} of them",
            next_step="check the base wheel that upstream.toml pins",
        )
    return new


def name_metadata(text: str, name: str, version: str) -> str:
    """METADATA of the patched wheel: new name and version, no requirement on a local version.

    >>> old = "Name: x-cpu\\nVersion: 1\\nRequires-Dist: torch==2.1+cpu; extra == 'a'\\n\\nbody\\n"
    >>> print(name_metadata(old, "x", "1+re.1"), end="")
    Name: x
    Version: 1+re.1
    Requires-Dist: torch==2.1; extra == 'a'
    <BLANKLINE>
    body
    """
    head, blank, body = text.partition("\n\n")
    head = _replace("METADATA", head, r"^Name: .*$", f"Name: {name}")
    head = _replace("METADATA", head, r"^Version: .*$", f"Version: {version}")
    # A package index has no local versions (torch==2.1+cpu): without this nothing installs.
    head = re.sub(r"^(Requires-Dist: [^;\n]*==\s*[\w.]+)\+[\w.]+", r"\1", head, flags=re.MULTILINE)
    return head + blank + body


def mark_for_tests(text: str, version: str, kernels: str) -> str:
    """METADATA that says that the wheel is for tests, and that no index accepts.

    >>> print(mark_for_tests("Name: x\\nSummary: fast\\n\\nbody\\n", "1.2", "x-1.1.whl"), end="")
    Name: x
    Summary: FOR TESTS ONLY: the Python of vLLM 1.2 over the kernels of x-1.1.whl
    Classifier: Private :: Do Not Upload
    <BLANKLINE>
    body
    """
    head, blank, body = text.partition("\n\n")
    head = re.sub(r"^Summary: .*\n?", "", head, flags=re.MULTILINE).rstrip("\n")
    said = f"FOR TESTS ONLY: the Python of vLLM {version} over the kernels of {kernels}"
    return f"{head}\nSummary: {said}\nClassifier: Private :: Do Not Upload{blank}{body}"


def name_wheel(text: str, tag: str) -> str:
    """WHEEL with the tags that the file name states.

    >>> print(
    ...     name_wheel("Wheel-Version: 1.0\\nTag: cp312-cp312-linux_x86_64\\n\\n", "py3-none-any")
    ... )
    Wheel-Version: 1.0
    Tag: py3-none-any
    <BLANKLINE>
    """
    lines = [line for line in text.rstrip("\n").split("\n") if not line.startswith("Tag: ")]
    lines += [f"Tag: {one}" for one in sorted(map(str, parse_tag(tag)))]
    return "\n".join(lines) + "\n"


def name_version_module(text: str, version: str) -> str:
    """``_version.py`` that says what the wheel's name says.

    >>> old = "__version__ = version = '1.2'\\n__version_tuple__ = version_tuple = (1, 2)\\n"
    >>> print(name_version_module(old, "1.2+re.1.cpu"), end="")
    __version__ = version = '1.2+re.1.cpu'
    __version_tuple__ = version_tuple = (1, 2, 're.1.cpu')
    """
    parsed = Version(version)
    parts = (*parsed.release, *([parsed.local] if parsed.local else []))
    text = _replace(
        "_version.py",
        text,
        r"^__version__ = version = .*$",
        f"__version__ = version = {version!r}",
    )
    return _replace(
        "_version.py",
        text,
        r"^__version_tuple__ = version_tuple = .*$",
        f"__version_tuple__ = version_tuple = {parts!r}",
    )
