# SPDX-License-Identifier: Apache-2.0
"""Compiling from source, with programs that stand in for Python, its pip, and the compilers."""

from __future__ import annotations

import json
import os
import platform
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.tools.toy import NAMES, VERSION, Toy, git

VARIANT = {"x86_64": "cuda", "aarch64": "cuda-aarch64"}[platform.machine()]
SOURCE = f"{VERSION}+re.3.source"

# Answers -c as a Python with these packages, and -m pip wheel by noting how it was called.
PYTHON = """\
#!{real}
import json, os, pathlib, sys
here = pathlib.Path(__file__).parent
if "-c" in sys.argv:
    print((here / "facts.json").read_text())
    sys.exit()
out, source = pathlib.Path(sys.argv[-2]), pathlib.Path(sys.argv[-1])
found = sorted(str(p.relative_to(source)) for p in source.rglob("*") if p.is_file())
call = {{"argv": sys.argv[1:], "env": dict(os.environ), "files": found}}
(here / "call.json").write_text(json.dumps(call))
print("compiling")
if (here / "fails").exists():
    sys.exit(3)
out.mkdir()
version = os.environ["VLLM_VERSION_OVERRIDE"]
(out / f"vllm-{{version}}-cp38-abi3-linux_x86_64.whl").write_text("compiled")
"""
NVCC = "#!/bin/sh\necho 'Cuda compilation tools, release 13.0, V13.0.88'\n"


@dataclass(frozen=True)
class Machine:
    """A directory of programs that is the whole PATH but git's."""

    bin: Path

    def put(self, name: str, text: str) -> None:
        path = self.bin / name
        path.write_text(text)
        path.chmod(0o755)

    def has(self, packages: dict[str, str], cuda: str | None = "13.0") -> None:
        facts = {"packages": packages, "cuda": cuda}
        (self.bin / "facts.json").write_text(json.dumps(facts))

    @property
    def python(self) -> str:
        return str(self.bin / "python")

    @property
    def call(self) -> dict:
        return json.loads((self.bin / "call.json").read_text())


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """A machine that can compile."""
    made = Machine(tmp_path / "bin")
    made.bin.mkdir()
    made.put("python", PYTHON.format(real=sys.executable))
    made.put("nvcc", NVCC)
    made.put("c++", "#!/bin/sh\n")
    made.has({"Ninja": "1.11", "torch": "2.1.0"})
    real_git = next(p for d in os.environ["PATH"].split(":") if (p := Path(d) / "git").exists())
    (made.bin / "git").symlink_to(real_git)
    monkeypatch.setenv("PATH", str(made.bin))
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.setenv("MAX_JOBS", "7")
    monkeypatch.setenv("VLLM_USE_PRECOMPILED", "1")
    return made


def build(toy: Toy, machine: Machine) -> tuple[str, ...]:
    return ("wheel", "build", "--variant", VARIANT, "--from-source", machine.python)


def test_the_command_compiles_the_patched_tree_without_isolation(
    toy: Toy, machine: Machine, capfd: pytest.CaptureFixture[str]
) -> None:
    toy.do(*build(toy, machine))
    *flags, out, source = machine.call["argv"]
    assert flags == [
        *("-m", "pip", "wheel", "--verbose", "--no-deps", "--no-cache-dir"),
        *("--no-build-isolation", "--wheel-dir"),
    ]
    assert Path(out).parent == Path(source).parent
    assert machine.call["files"] == sorted(git(toy.tree, "ls-files").splitlines())


def test_the_environment_decides_version_and_device(toy: Toy, machine: Machine) -> None:
    toy.do(*build(toy, machine))
    env = machine.call["env"]
    assert env["VLLM_VERSION_OVERRIDE"] == SOURCE
    assert env["VLLM_TARGET_DEVICE"] == "cuda"
    assert env["SOURCE_DATE_EPOCH"] == "315532800"
    assert env["MAX_JOBS"] == "7"
    # Else vLLM's setup.py would take finished kernels instead of compiling these.
    assert "VLLM_USE_PRECOMPILED" not in env


def test_the_wheel_lands_in_the_folder_and_nothing_else_does(toy: Toy, machine: Machine) -> None:
    out = toy.do(*build(toy, machine))
    (path,) = (toy.root / "build/wheels").iterdir()
    assert path.name == f"vllm-{SOURCE}-cp38-abi3-linux_x86_64.whl"
    assert out.splitlines()[0] == f"wheel: {path} (3 patches)"
    assert not git(toy.tree, "status", "--porcelain")


def test_a_series_that_changes_kernels_can_be_compiled(toy: Toy, machine: Machine) -> None:
    toy.commit("[Kernel] Faster", {"csrc/kernel.cu": "// faster\n"})
    toy.do("series", "export")
    assert "--from-source" in toy.refuse("wheel", "build", "--variant", "cpu")
    assert "(4 patches)" in toy.do(*build(toy, machine))


def test_a_compiled_wheel_cannot_be_proved_and_verify_says_so(toy: Toy, machine: Machine) -> None:
    toy.do(*build(toy, machine))
    (path,) = (toy.root / "build/wheels").iterdir()
    path.write_bytes(b"PK\x05\x06" + bytes(18))  # an empty archive
    assert "built from source" in toy.refuse("wheel", "verify")


def test_everything_that_is_missing_is_told_at_once(toy: Toy, machine: Machine) -> None:
    (machine.bin / "nvcc").unlink()
    (machine.bin / "c++").unlink()
    machine.has({"torch": "2.0.0"})
    error = toy.refuse(*build(toy, machine))
    assert "this machine cannot compile the wheel: 4" in error
    assert "there is no C++ compiler" in error
    assert "there is no CUDA compiler" in error
    assert "expected: ninja>=1\n  found:    nothing" in error
    assert "expected: torch==2.1.0\n  found:    2.0.0" in error
    assert not (machine.bin / "call.json").exists()


@pytest.mark.parametrize("cuda", ["12.8", None])
def test_a_compiler_of_another_cuda_than_torch_is_refused(
    toy: Toy, machine: Machine, cuda: str | None
) -> None:
    machine.has({"ninja": "1.11", "torch": "2.1.0"}, cuda)
    error = toy.refuse(*build(toy, machine))
    assert "not of one CUDA" in error
    assert "release 13." in error


def test_cuda_home_names_the_compiler(
    toy: Toy, machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "none"))
    assert "there is no CUDA compiler" in toy.refuse(*build(toy, machine))


@pytest.mark.parametrize("variant", sorted({"cpu", "cuda", "cuda-aarch64"} - {VARIANT}))
def test_another_machines_wheel_is_not_compiled(toy: Toy, machine: Machine, variant: str) -> None:
    words = ("wheel", "build", "--variant", variant, "--from-source", machine.python)
    assert "only a CUDA wheel for the machine itself" in toy.refuse(*words)


def test_offline_is_refused(toy: Toy, machine: Machine) -> None:
    assert "needs the network" in toy.refuse(*build(toy, machine), "--offline")


def test_a_tree_that_is_not_the_series_is_refused(toy: Toy, machine: Machine) -> None:
    toy.do("series", "apply", "--before", NAMES[2])
    assert "not the applied series" in toy.refuse(*build(toy, machine))


def test_a_compiler_that_fails_leaves_nothing(toy: Toy, machine: Machine) -> None:
    (machine.bin / "fails").write_text("")
    assert "exit status 3" in toy.refuse(*build(toy, machine))
    assert list((toy.root / "build/wheels").iterdir()) == []
