# SPDX-License-Identifier: Apache-2.0
"""A lock keeps the digests that its machines install, and no others."""

import hashlib
from pathlib import Path

import pytest

from tests.tools.toy import Index, Toy

PURE = "py3-none-any"
WHEELS = {
    "fast-2": [
        "cp311-cp311-manylinux_2_17_x86_64.manylinux2014_x86_64",
        "cp311-cp311-manylinux_2_28_x86_64",
        "cp311-cp311-manylinux_2_34_x86_64",
        "cp311-cp311-manylinux_2_28_aarch64",
        "cp311-cp311-macosx_11_0_arm64",
        "cp311-cp311-win_amd64",
        "cp312-cp312-manylinux_2_28_x86_64",
    ],
    "fast-1": ["cp311-cp311-manylinux_2_28_x86_64"],
    "stable-1": ["cp39-abi3-manylinux2014_x86_64", "cp39-abi3-musllinux_1_2_x86_64"],
    "plain-3": [PURE],
}
TARGET = ("--python", "3.11", "--machine", "x86_64", "--glibc", "2.28")


def digest(name: str, tags: str) -> str:
    return hashlib.sha256(f"wheel {name}-{tags}.whl".encode() * 3).hexdigest()


@pytest.fixture
def project(toy: Toy, index: Index) -> Toy:
    """A project whose package index has the wheels above."""
    index.add(*(f"{name}-{tags}.whl" for name in WHEELS for tags in WHEELS[name]))
    return toy


def lock(path: Path, *names: str) -> Path:
    """A lock as the installer writes it: every digest, and who asks for the package."""
    lines = ["# made by a test"]
    for name in names:
        digests = sorted(digest(name, tags) for tags in WHEELS[name])
        package = name.replace("-", "==")
        lines.append(" \\\n    --hash=sha256:".join([package, *digests]))
        lines.append("    # via somebody")
    path.write_text("\n".join(lines) + "\n")
    return path


def trim(project: Toy, tmp_path: Path, names: tuple[str, ...], *more: str) -> str:
    out = tmp_path / "out.txt"
    place = lock(tmp_path / "all.txt", *names)
    project.do("locks", "trim", str(place), "--out", str(out), *more)
    return out.read_text()


def kept(text: str, name: str) -> set[str]:
    """The wheels of a package whose digests stand in a lock."""
    return {tags for tags in WHEELS[name] if digest(name, tags) in text}


def test_the_wheel_that_an_installer_takes_is_left(project: Toy, tmp_path: Path) -> None:
    text = trim(project, tmp_path, ("fast-2", "plain-3", "stable-1"), *TARGET)
    assert kept(text, "fast-2") == {"cp311-cp311-manylinux_2_28_x86_64"}
    assert kept(text, "stable-1") == {"cp39-abi3-manylinux2014_x86_64"}
    assert kept(text, "plain-3") == {PURE}
    assert kept(text, "fast-1") == set()
    assert text.startswith("# made by a test\nfast==2 \\\n    --hash=sha256:")
    assert text.count("    # via somebody\n") == 3


def test_each_python_and_machine_has_its_wheel(project: Toy, tmp_path: Path) -> None:
    text = trim(project, tmp_path, ("fast-2",), *TARGET, "--python", "3.12")
    assert len(kept(text, "fast-2")) == 2
    text = trim(project, tmp_path, ("fast-2",), *TARGET, "--machine", "aarch64")
    assert "cp311-cp311-manylinux_2_28_aarch64" in kept(text, "fast-2")


@pytest.mark.parametrize(
    ("locked", "old", "new", "more", "said"),
    [
        ("stable-1", "", "", ("--machine", "aarch64"), "for a target\n  where:    stable==1"),
        ("plain-3", digest("plain-3", PURE), "0" * 64, (), "states another digest"),
        ("fast-2", "", "", ("--include", "part.txt"), "an included lock has another version"),
    ],
)
def test_a_lock_that_does_not_fit_is_refused(
    project: Toy, tmp_path: Path, locked: str, old: str, new: str, more: tuple[str, ...], said: str
) -> None:
    lock(tmp_path / "part.txt", "fast-1")
    place, out = lock(tmp_path / "all.txt", locked), tmp_path / "out.txt"
    place.write_text(place.read_text().replace(old, new))
    words = ("locks", "trim", str(place), "--out", str(out), *TARGET, *more)
    assert said in project.refuse(*words)
    assert not out.exists()


def test_what_an_included_lock_holds_is_left_out(project: Toy, tmp_path: Path) -> None:
    lock(tmp_path / "part.txt", "plain-3")
    text = trim(project, tmp_path, ("fast-2", "plain-3"), *TARGET, "--include", "part.txt")
    assert text.startswith("# made by a test\n-r part.txt\nfast==2 ")
    assert "plain" not in text
