# SPDX-License-Identifier: Apache-2.0
"""A new line: another line's series on another release. Git rebases it in the new build tree."""

import argparse
import re
import shutil
from pathlib import Path
from typing import Any

import tomlkit

from tools.common.cli import ToolError, add_flag, count, tell
from tools.common.files import staging
from tools.common.git import Git
from tools.common.pin import BaseWheel, PinnedFile, Project
from tools.series import tree
from tools.series.apply import apply_series
from tools.series.export import export_series
from tools.series.series import read_series
from tools.series.tree import APPLIED_REF, BASE_REF, BRANCH
from tools.source.fetch import Index, fetch, releases

# The other line's series on its own release, beside the new base.
OLD_BASE, OLD_APPLIED = "refs/old/base", "refs/old/applied"
OLD = f"{OLD_BASE}..{OLD_APPLIED}"
CONTAINED = "contained"
# The patch that a commit of the build tree is of.
_NAME = "%(trailers:key=Patch-Filename,valueonly)"
_FILE = ("filename", "size", "sha256")


def declare(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--from", dest="other", metavar="LINE", required=True, help="begin with it")
    add_flag(parser, "--dry-run", "only say which patches would conflict; leave nothing behind")


def run(arguments: argparse.Namespace, project: Project) -> None:
    """Begin a line of patches/ from another one. `--on` names the new line, as v1.2.3 for 1.2.3.
    The command copies the pin and the inputs of the locks, says which patches conflict with the
    release, and rebases the series in build/<line>/vllm. At a conflict it stops, and says how to go
    on with git. An error before the rebase leaves nothing behind. It never commits in this
    repository."""
    other = Project(project.root, arguments.other)
    for place in (project.patches, inputs(project), project.tree):
        if place.exists():
            raise ToolError("the line is there already", place, next_step="name another release")
    pin = find_release(other, project.line)
    try:
        git = set_up(other, project, pin)
        trials = try_all(git)
    except BaseException:
        remove(project)
        raise
    print(summary(trials, project.pin.source))
    if arguments.dry_run:
        remove(project)
    else:
        rebase(git, project, list(trials))


def inputs(project: Project) -> Path:
    return project.root / "requirements" / project.line


def remove(project: Project) -> None:
    for folder in (project.patches, inputs(project), project.tree):
        shutil.rmtree(folder, ignore_errors=True)


def find_release(other: Project, line: str) -> Any:
    """``upstream.toml`` for the release that a line is named for, except the id of its tree."""
    old, index, version = other.pin, Index(), line.removeprefix("v")
    files = index.files(old.source.distribution)
    named = {file.link.filename: file for file in files}
    found = named.get(f"{old.source.distribution}-{version}.tar.gz")
    if found is None or line != f"v{version}":
        what = "a line is named for a release that the package index has as a source archive"
        expected = f"as v1.2.3; the newest are {', '.join(map(str, releases(files)[-5:]))}"
        raise ToolError(what, "--on", expected, line)
    source = index.pin(found)
    fetch(source, other)
    pin: Any = tomlkit.parse(other.pin_file.read_text(encoding="utf-8"))  # comments stay
    pin["release"].update({"version": version, "tag": line, "commit": "unknown"})
    pin["source"].update({key: getattr(source, key) for key in _FILE})
    pin["source"].pop("submodule", None)
    for variant, wheel in pin.get("wheel", {}).items():
        _find_wheel(index, version, wheel, old.wheels.get(variant))
    return pin


def _find_wheel(index: Index, version: str, wheel: Any, old: BaseWheel | None) -> None:
    """Pin the release's wheel like another line's one. A wheel for tests lends its kernels to any
    release. If there is none, the table of the wheel stays without a file."""
    # For the same interpreter and machine, and any C library.
    kind = re.sub(r"linux_\d+_\d+", r"linux[\\w.]+", wheel["tag"])
    files = [file for file in index.files(str(wheel["distribution"])) if file.version == version]
    like = {name: f for f in files if re.search(rf"-{kind}\.whl$", name := f.link.filename)}
    wheel.pop("version", None)
    if like:
        file = index.pin(like[max(like)])
    elif old and old.tests_only:
        file = old.file
        wheel["version"] = file.version
    else:
        print(f"note: there is no base wheel {wheel['distribution']} of vLLM {version}")
        for key in _FILE:
            wheel.pop(key, None)
        return
    tag = "-".join(file.filename.removesuffix(".whl").split("-")[-3:])
    wheel.update({key: getattr(file, key) for key in _FILE} | {"tag": tag})


def set_up(other: Project, project: Project, pin: Any) -> Git:
    """Make the new line without patches: its folders, and a build tree on the release that has the
    other line's commits too."""
    apply_series(other, read_series(other.series_file))  # refuses what would be lost
    left_out = shutil.ignore_patterns("*.patch", "series", "*.md")  # the export writes these
    shutil.copytree(other.patches, project.patches, ignore=left_out)
    project.series_file.write_text("")
    if inputs(other).is_dir():
        shutil.copytree(inputs(other), inputs(project))
        for path in inputs(project).glob("*.in"):
            text = path.read_text(encoding="utf-8")
            path.write_text(text.replace(f"build/{other.line}/", f"build/{project.line}/"), "utf-8")
    with staging(project.tree) as place:
        source = pin["source"]
        archive = project.downloads / str(source["filename"])
        git, tree_id = tree.unpack_source(archive, source["archive_only"], place)
        pin["release"]["tree"] = tree_id
        project.pin_file.write_text(tomlkit.dumps(pin), encoding="utf-8")
        tree.commit_base(git, project.pin)
        place.rename(project.tree)
    git = Git(project.tree)
    git.fetch(other.tree, f"{BASE_REF}:{OLD_BASE}", f"{APPLIED_REF}:{OLD_APPLIED}")
    # Also for the person who goes on. Lines of a message may begin with "#".
    git.run("config", "merge.conflictStyle", "diff3")
    git.run("config", "core.commentChar", ";")
    return git


def rebase(git: Git, project: Project, names: list[str]) -> None:
    """Rebase the other line's commits onto the release, and export them."""
    git.run("checkout", "--quiet", "-B", BRANCH, OLD_APPLIED)
    done = git.run("rebase", "--empty=drop", "--onto", BASE_REF, OLD_BASE, accept=(0, 1))
    if done.returncode:
        steps = [
            f"edit and git add them in {git.path}, then: git rebase --continue",
            "to leave the patch out: git rebase --skip",
            f"when git is done: make export ON={project.line}",
            f"what changed: git range-diff {OLD} {BASE_REF}..HEAD",
            f"to give up: rm -r {project.build} {project.patches} {inputs(project)}",
        ]
        what = f"a patch conflicts with vLLM {project.pin.version}"
        details = [*conflicts_in(done.stdout), *steps]
        raise ToolError(what, git.log("REBASE_HEAD", _NAME), details=details)
    if git.commits(f"{BASE_REF}..HEAD"):
        export_series(project)
        print(git.text("range-diff", "--no-color", OLD, f"{BASE_REF}..HEAD"))
    series = read_series(project.series_file)
    for name in sorted(set(names) - {patch.name for patch in series}):
        print(f"left out: {name}")
    apply_series(project, series)
    print(f"rebased: {count(len(series), 'patch', 'patches')} onto vLLM {project.pin.version}")
    print(f"next: make lock ON={project.line}; then CONTRIBUTING.md, 'Adding a line'")


def conflicts_in(said: bytes) -> list[str]:
    """Git's words on each conflict."""
    lines = said.decode(errors="replace").splitlines()
    return [line.removeprefix("CONFLICT ") for line in lines if line.startswith("CONFLICT ")]


def try_all(git: Git) -> dict[str, str]:
    """Try every patch of the other line. If a patch conflicts, its own side is taken before the
    next one is tried. Returns where each conflicts, CONTAINED, or nothing if it applies."""
    found = {}
    git.run("checkout", "--quiet", "--detach", BASE_REF)
    for commit in git.commits(OLD):
        name, said = git.log(commit, _NAME), ""
        done = git.run("cherry-pick", commit, accept=(0, 1))
        if done.returncode:
            conflicts = "; ".join(conflicts_in(done.stdout)) or "conflict"
            said = conflicts if git.changed("--cached", "HEAD") else CONTAINED
            git.run("cherry-pick", "--abort")
        if said not in ("", CONTAINED):
            _favour(git, commit)
        found[name] = said
        tell(f"{name}: {said or 'applies'}")
    return found


def _favour(git: Git, commit: str) -> None:
    """Put a patch on HEAD, and resolve every conflict in favour of the patch."""
    if git.run("cherry-pick", commit, "-X", "theirs", accept=(0, 1)).returncode:
        for path in git.changed("--diff-filter=U"):  # a file that one side removed
            gone = path not in git.files(commit)
            git.run(*(("rm", "-qf") if gone else ("checkout", commit)), "--", path)
        git.run("commit", "--quiet", "--allow-empty", "-C", commit)
    git.run("clean", "--quiet", "--force", "-d")


def summary(trials: dict[str, str], source: PinnedFile) -> str:
    """How many patches apply, and where the others conflict."""
    clean, contained = (list(trials.values()).count(said) for said in ("", CONTAINED))
    lines = [
        f"onto: vLLM {source.version}, {source.filename}, sha256 {source.sha256}",
        f"{count(len(trials), 'patch', 'patches')}: {clean} apply, "
        f"{len(trials) - clean - contained} conflict, {contained} are contained already",
        *(f"  {name}: {said}" for name, said in trials.items() if said),
    ]
    return "\n".join(lines)
