# SPDX-License-Identifier: Apache-2.0
"""The few lines of a wheel that name it: each rewritten in place, the rest left as it is."""

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
    """METADATA of the patched wheel: new name and version, no requirement on a local version."""
    head, blank, body = text.partition("\n\n")
    head = _replace("METADATA", head, r"^Name: .*$", f"Name: {name}")
    head = _replace("METADATA", head, r"^Version: .*$", f"Version: {version}")
    # A package index has no local versions (torch==2.1+cpu): without this nothing installs.
    head = re.sub(r"^(Requires-Dist: [^;\n]*==\s*[\w.]+)\+[\w.]+", r"\1", head, flags=re.MULTILINE)
    return head + blank + body


def mark_for_tests(text: str, version: str, kernels: str) -> str:
    """METADATA that says that the wheel is for tests, and that no index accepts."""
    head, blank, body = text.partition("\n\n")
    head = re.sub(r"^Summary: .*\n?", "", head, flags=re.MULTILINE).rstrip("\n")
    said = f"FOR TESTS ONLY: the Python of vLLM {version} over the kernels of {kernels}"
    return f"{head}\nSummary: {said}\nClassifier: Private :: Do Not Upload{blank}{body}"


def name_wheel(text: str, tag: str) -> str:
    """WHEEL with the tags that the file name states."""
    lines = [line for line in text.rstrip("\n").split("\n") if not line.startswith("Tag: ")]
    lines += [f"Tag: {one}" for one in sorted(map(str, parse_tag(tag)))]
    return "\n".join(lines) + "\n"


def name_version_module(text: str, version: str) -> str:
    """``_version.py`` with the version of the wheel's name."""
    parsed = Version(version)
    parts = (*parsed.release, *([parsed.local] if parsed.local else []))
    values = {"__version__ = version": version, "__version_tuple__ = version_tuple": parts}
    for name, value in values.items():
        text = _replace("_version.py", text, rf"^{name} = .*$", f"{name} = {value!r}")
    return text
