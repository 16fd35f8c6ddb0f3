# SPDX-License-Identifier: Apache-2.0
"""The patched wheel compiled from source, for a series that changes kernels.

An overlay cannot carry those. Compiling needs the CUDA toolkit, the build requirements of vLLM in
one Python, hours, and the network: vLLM's CMake files fetch their own dependencies. What comes out
depends on the machine, so it has another version than an overlay, and ``wheel verify`` refuses it.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name, parse_wheel_filename
from packaging.version import Version

from tools.download import digest_of
from tools.errors import FailedCommand, Problems, ToolError
from tools.git import Git
from tools.pin import BaseWheel, Pin, Project
from tools.tree import open_tree
from tools.wheel import PACKAGE, SOURCE_SUFFIX, Built, choose_base, tree_series

_STDERR = 2  # standard output is for the result

# The file of the tree that lists what must be installed to compile.
_REQUIREMENTS = "requirements/build/cuda.txt"
_FACTS = """
import importlib.metadata as metadata, json
found = {d.name: d.version for d in metadata.distributions() if d.name}
try:
    import torch
    cuda = torch.version.cuda
except ImportError:
    cuda = None
print(json.dumps({"packages": found, "cuda": cuda}))
"""


def source_version(pin: Pin, release: int) -> str:
    return str(Version(f"{pin.version}+re.{release}.{SOURCE_SUFFIX}"))


def command(python: Path, source: Path, out: Path) -> list[str]:
    """Compile the tree at ``source``; the wheel goes into ``out``."""
    pip = [str(python), "-m", "pip", "wheel", "--verbose", "--no-deps", "--no-cache-dir"]
    # No isolation: kernels must be compiled against the torch that is installed.
    return [*pip, "--no-build-isolation", "--wheel-dir", str(out), str(source)]


def environment(version: str, caller: Mapping[str, str]) -> dict[str, str]:
    """The caller's environment (MAX_JOBS, CUDA_HOME, mirrors) and what decides the result."""
    kept = {name: value for name, value in caller.items() if name != "VLLM_USE_PRECOMPILED"}
    return {
        **kept,
        "VLLM_TARGET_DEVICE": "cuda",
        "VLLM_VERSION_OVERRIDE": version,
        "SOURCE_DATE_EPOCH": "315532800",  # the zip format's first day
    }


def find_nvcc(caller: Mapping[str, str]) -> Path | None:
    if home := caller.get("CUDA_HOME"):
        path = Path(home) / "bin" / "nvcc"
        return path if path.exists() else None
    found = shutil.which("nvcc", path=caller.get("PATH"))
    return Path(found) if found else None


def toolchain_problems(
    python: Path, git: Git, base: BaseWheel, caller: Mapping[str, str]
) -> list[ToolError]:
    """What this machine lacks to compile, all of it at once."""
    found: list[ToolError] = []
    if base.variant.startswith("cpu") or not base.tag.endswith(f"_{platform.machine()}"):
        found.append(
            ToolError(
                "only a CUDA wheel for the machine itself is compiled",
                expected=f"a CUDA variant for {platform.machine()}",
                found=f"{base.variant}, {base.tag}",
            )
        )
    if shutil.which("c++", path=caller.get("PATH")) is None:
        found.append(ToolError("there is no C++ compiler", expected="c++ in PATH"))
    nvcc = find_nvcc(caller)
    if nvcc is None:
        found.append(ToolError("there is no CUDA compiler", expected="nvcc in CUDA_HOME or PATH"))
    done = subprocess.run(
        [str(python), "-I", "-c", _FACTS], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise ToolError(
            "this Python does not say what it has installed",
            where=python,
            details=done.stderr.splitlines(),
        )
    facts = json.loads(done.stdout)
    installed = {canonicalize_name(name): found for name, found in facts["packages"].items()}
    text = git.run("show", f"HEAD:{_REQUIREMENTS}").stdout.decode()
    for line in text.splitlines():
        line = line.split("#", 1)[0].strip()
        if not line or line.startswith("-"):
            continue
        wanted = Requirement(line)
        there = installed.get(canonicalize_name(wanted.name))
        if there is None or not wanted.specifier.contains(there, prereleases=True):
            found.append(
                ToolError(
                    "a build requirement is not met",
                    where=f"{python}, {_REQUIREMENTS}",
                    expected=str(wanted),
                    found=there or "nothing",
                )
            )
    if nvcc is not None:
        said = subprocess.run([str(nvcc), "--version"], capture_output=True, text=True, check=False)
        release = re.search(r"release (\d+)\.", said.stdout)
        cuda = facts["cuda"]
        if not release or not cuda or release[1] != cuda.split(".")[0]:
            found.append(
                ToolError(
                    "the CUDA compiler and the installed torch are not of one CUDA",
                    where=nvcc,
                    expected=f"CUDA {cuda or 'in torch'}",
                    found=release[0] if release else said.stdout.strip() or "no version",
                )
            )
    return found


def compile_wheel(
    project: Project,
    variant: str,
    tree: Path,
    series_file: Path,
    out: Path,
    *,
    python: Path,
    release: int | None = None,
) -> Built:
    """Compile the applied series and put the wheel into ``out``, completely or not at all."""
    base = choose_base(project.pin, variant)
    if project.offline:
        raise ToolError(
            "compiling needs the network: vLLM's CMake files fetch sources of their own",
            found="--offline",
            next_step="leave out --offline, or build the overlay: leave out --from-source",
        )
    git = open_tree(tree, project.pin)
    series = tree_series(git, project, series_file)
    version = source_version(project.pin, (release or project.release) if series else 0)
    if problems := toolchain_problems(python, git, base, os.environ):
        raise Problems("this machine cannot compile the wheel", problems)
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".source-", dir=out) as name:
        scratch = Path(name)
        # A copy: compiling writes into its source, and the build tree stays the series alone.
        source, made = scratch / PACKAGE, scratch / "out"
        git.run("checkout-index", "--all", "--force", f"--prefix={source}/")
        words = command(python, source, made)
        done = subprocess.run(
            words, env=environment(version, os.environ), stdout=_STDERR, check=False
        )
        if done.returncode:
            raise FailedCommand(words, done.returncode, "its output stands above")
        wheels = sorted(made.glob("*.whl"))
        if len(wheels) != 1 or str(parse_wheel_filename(wheels[0].name)[1]) != version:
            raise ToolError(
                "compiling did not give the wheel that was asked for",
                where=made,
                expected=f"one wheel of version {version}",
                found=", ".join(path.name for path in wheels) or "none",
            )
        path = out / wheels[0].name
        wheels[0].replace(path)
    return Built(path, path.stat().st_size, digest_of(path), len(series))
