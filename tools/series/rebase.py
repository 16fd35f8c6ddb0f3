# SPDX-License-Identifier: Apache-2.0
"""The series on another release: git rebases it in a place of its own.

That place, ``build/<line>/rebase``, has the new pin in ``patches`` and the commits in ``tree``.
"""

import argparse
import re
import shutil
import tarfile
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import tomlkit
from packaging.version import InvalidVersion, Version

from tools.common.cli import ToolError, add_flag, table, tell
from tools.common.files import staging, write
from tools.common.git import Git
from tools.common.pin import UNKNOWN, PinnedFile, Project
from tools.series import tree
from tools.series.apply import apply_series
from tools.series.export import export_series
from tools.series.series import read_series
from tools.series.tree import APPLIED_REF, BASE_REF
from tools.source.fetch import Index, fetch, like_wheel, releases, version_of

FINISH = "python -m tools series rebase --finish"
# The series on its old base, beside the new base.
OLD_BASE, OLD_APPLIED = "refs/old/base", "refs/old/applied"
OLD = f"{OLD_BASE}..{OLD_APPLIED}"
CLEAN, CONFLICT, CONTAINED = "clean", "conflict", "contained"
# The patch that a commit of the build tree is of.
_NAME = "%(trailers:key=Patch-Filename,valueonly)"
_FILE = ("filename", "size", "sha256")


def declare(parser: argparse.ArgumentParser) -> None:
    step = parser.add_mutually_exclusive_group(required=True)
    step.add_argument("--onto", metavar="VERSION", help="begin: a release")
    add_flag(step, "--finish", "put the new series in place, after git rebase is done")
    begin = parser.add_argument_group("with --onto")
    begin.add_argument("--commit", help="the commit of the release's tag")
    add_flag(begin, "--dry-run", "only show what would conflict, as Markdown; change nothing")


def run(arguments: argparse.Namespace, project: Project) -> None:
    """Move the series to another release of vLLM. `git rebase` runs in build/<line>/rebase. It
    leaves out what the release contains. After a conflict, go on there with git, then finish. At
    the end, the command replaces patches/<line> and the pin (source, base wheels), and shows a
    range-diff. It never pushes. It never commits in this repository."""
    under_way, place = state(project), rebased(project).root
    if arguments.finish and not under_way:
        step = "begin one: python -m tools series rebase --onto <version>"
        raise ToolError("no rebase is under way", place, next_step=step)
    if arguments.finish:
        finish(project)
    elif under_way:
        step = f"{FINISH}, or give it up: rm -r {place}"
        raise ToolError("a rebase is under way already", found=under_way, next_step=step)
    else:
        begin(project, find_target(project, arguments.onto, arguments.commit), arguments.dry_run)


def rebased(project: Project, at: Path | None = None) -> Project:
    """The project as it will be, in ``build/<line>/rebase`` or ``at`` another place."""
    at = at or project.build / "rebase"
    return Project(at, project.line, tree=at / "tree")


def state(project: Project) -> str | None:
    """How far the rebase under way came, or None."""
    new = rebased(project)
    if not new.pin_file.exists():
        return None
    git = Git(new.tree)
    stopped = git.commit_id("REBASE_HEAD")
    at = f", stopped at {git.log(stopped, '%s')}" if stopped else ""
    return f"onto vLLM {new.pin.version} in {new.tree}{at}"


class Target(NamedTuple):
    """``upstream.toml`` on what to move to, but for the id of its tree."""

    pin: Any  # a document of tomlkit: comments and other keys stay
    source: PinnedFile


def find_target(project: Project, onto: str, commit: str | None) -> Target:
    """Find a version on the package index, and get its source; its commit may be known."""
    if commit and not re.fullmatch(r"[0-9a-f]{40}", commit):
        what, step = "give the whole id of the commit", "git ls-remote <upstream> shows it"
        raise ToolError(what, "--commit", "40 hexadecimal digits", commit, step)
    try:
        version = Version(onto)
    except InvalidVersion:
        what, expected = "this is not a version of vLLM", "a version such as 1.2.3"
        raise ToolError(what, "--onto", expected, onto) from None
    old, index = project.pin, Index()
    files = index.files(old.source.distribution)
    archives = (file for file in files if file.link.filename.endswith(".tar.gz"))
    found = next((file for file in archives if version_of(file) == version), None)
    if found is None:
        what = "the package index has no source archive of this version"
        newest = f"a release; the newest are {', '.join(map(str, releases(files)[-5:]))}"
        raise ToolError(what, old.source.distribution, newest, version, "check the version")
    if found.link.is_yanked:
        print(f"note: {found.link.filename} is withdrawn on the package index")
    source = index.pin(found)
    stated = _stated_commit(fetch(source, project))
    if commit and not commit.startswith(stated):
        what, said = "the source archive was made from another commit", f"{stated}... in it"
        raise ToolError(what, source.filename, commit, said, "check the commit of the tag")
    pin: Any = tomlkit.parse(project.pin_file.read_text(encoding="utf-8"))
    release = {"version": source.version, "tag": f"v{version}"}
    pin["release"].update(release | {"commit": commit or stated or UNKNOWN})
    pin["source"].update({key: getattr(source, key) for key in _FILE})
    for variant, wheel in pin.get("wheel", {}).items():
        files = [f for f in index.files(str(wheel["distribution"])) if version_of(f) == version]
        wheel.pop("version", None)
        if like := like_wheel(files, str(wheel["tag"])):
            file = index.pin(like)
        elif variant in old.wheels and old.wheels[variant].tests_only:
            file = old.wheels[variant].file  # lends its kernels to any release
            wheel["version"] = file.version
        else:
            print(f"note: there is no base wheel {variant} of vLLM {version}")
            for key in _FILE:
                wheel.pop(key, None)
            continue
        tag = "-".join(file.filename.removesuffix(".whl").split("-")[-3:])
        wheel.update({key: getattr(file, key) for key in _FILE} | {"tag": tag})
    return Target(pin, source)


def _stated_commit(archive: Path) -> str:
    """The beginning of the commit's id, if the archive's version module states it."""
    with tarfile.open(archive) as tar:
        modules = (m for m in tar if PurePosixPath(m.name).parts[1:] == ("vllm", "_version.py"))
        module = next(modules, None)
        file = tar.extractfile(module) if module else None
        text = file.read().decode(errors="replace") if file else ""
    match = re.search(r"^__commit_id__ = .*'g?([0-9a-f]{7,40})'", text, re.MULTILINE)
    return match[1] if match else ""


def begin(project: Project, target: Target, dry_run: bool) -> None:
    """Make the place of the rebase, completely or not at all, and start."""
    new, release = rebased(project), target.pin["release"]
    print(f"onto: vLLM {release['version']} ({release['tag']}, commit {release['commit']})")
    if target.source.sha256 == project.pin.source.sha256:
        print(f"nothing to do: the series stands on vLLM {release['version']}")
        return
    if dry_run:
        show_trials(project, target)
        return
    with staging(new.root) as stage:
        set_up(project, target, stage)
        stage.rename(new.root)
    git = Git(new.tree)
    words = ("rebase", "--empty=drop", "--onto", BASE_REF, OLD_BASE, OLD_APPLIED)
    done = git.run(*words, accept=(0, 1))
    if done.returncode:
        what = f"a patch conflicts with vLLM {release['version']}"
        steps = [
            f"edit and git add them in {git.path}, then: git rebase --continue",
            "to leave the patch out: git rebase --skip",
            f"when git is done: {FINISH}",
            f"to give up: rm -r {new.root}",
        ]
        details = [*conflicts_in(done.stdout), *steps]
        raise ToolError(what, git.log("REBASE_HEAD", _NAME), details=details)
    finish(project)


def set_up(project: Project, target: Target, stage: Path) -> Git:
    """In ``stage``: the series with the new pin, and a tree on the target with the old commits."""
    apply_series(project, read_series(project.series_file))  # refuses what would be lost
    new, archive_only = rebased(project, stage), target.pin["source"]["archive_only"]
    new.tree.mkdir()
    git, tree_id = tree.unpack_source(fetch(target.source, project), archive_only, new.tree)
    shutil.copytree(project.patches, new.patches, symlinks=True)
    target.pin["release"]["tree"] = tree_id
    new.pin_file.write_text(tomlkit.dumps(target.pin), encoding="utf-8")
    tree.commit_base(git, new.pin)
    git.fetch(project.tree, f"{BASE_REF}:{OLD_BASE}", f"{APPLIED_REF}:{OLD_APPLIED}")
    # Also for the person who goes on. Lines of a message may begin with "#".
    for setting in ("merge.conflictStyle diff3", "core.commentChar ;"):
        git.run("config", *setting.split())
    return git


def finish(project: Project) -> None:
    """Check the series that git made, replace the old series with it, and print what changed."""
    new = rebased(project)
    git, built = Git(new.tree), Git(project.tree)
    names = git.text("log", "--reverse", f"--format={_NAME}", OLD).split()
    tell(f"checking the patches; if one is wrong, correct it in {new.tree}, then: {FINISH}")
    if names:  # a line begins with none
        export_series(new, drop=names)
    series = read_series(new.series_file)
    apply_series(new, series)
    apply_series(project, read_series(project.series_file))  # refuses what would be lost
    if built.commit_id(APPLIED_REF) != git.commit_id(OLD_APPLIED):
        what = "the series changed since the rebase began; nothing is overwritten"
        step = f"put it back (git restore), or begin again: rm -r {new.root}"
        raise ToolError(what, where=project.patches, next_step=step)
    for name in names:
        (project.patches / name).unlink()
    for path in new.patches.iterdir():
        write(project.patches / path.name, path.read_bytes())
    built.fetch(new.tree, "+refs/re/*:refs/re/*")
    built.run("checkout", "--quiet", "-B", tree.BRANCH, APPLIED_REF)
    tree.write_record(built, tree.record(built, series, new.pin, APPLIED_REF))
    if series:
        ranges = (OLD, f"{BASE_REF}..{APPLIED_REF}")
        print(git.text("-c", "core.abbrev=12", "range-diff", "--no-color", *ranges))
    print(f"rebased: {len(series)} patches onto vLLM {new.pin.version}")
    kept = {patch.name for patch in series}
    for name in (name for name in names if name not in kept):
        print(f"left out: {name}")
    if place := new.pin.submodule:
        print(f"next: git update-index --cacheinfo 160000,<the commit {new.pin.commit}>,{place}")
    print("next: make lock && make install && make test; then commit what changed")
    shutil.rmtree(new.root)


def conflicts_in(said: bytes) -> list[str]:
    """Git's words on each conflict."""
    lines = said.decode(errors="replace").splitlines()
    return [line.removeprefix("CONFLICT ") for line in lines if line.startswith("CONFLICT ")]


class Trial(NamedTuple):
    """What happens to a patch when those before it are resolved in their own favour."""

    name: str
    verdict: str  # CLEAN, CONTAINED or CONFLICT
    conflicts: list[str]


def try_all(project: Project, target: Target) -> list[Trial]:
    """Try every patch, in a place that is gone afterwards."""
    trials: list[Trial] = []
    with staging(rebased(project).root) as stage:
        git = set_up(project, target, stage)
        for commit in git.commits(OLD):
            done, verdict = git.run("cherry-pick", commit, accept=(0, 1)), CLEAN
            if done.returncode:
                verdict = CONFLICT if git.changed("--cached", "HEAD") else CONTAINED
                git.run("cherry-pick", "--abort")
            if verdict == CONFLICT:
                _favour(git, commit)
            trials.append(Trial(git.log(commit, _NAME), verdict, conflicts_in(done.stdout)))
            tell(f"{trials[-1].name}: {verdict}")
    return trials


def _favour(git: Git, commit: str) -> None:
    """Put a patch on HEAD, and resolve every conflict in favour of the patch."""
    if git.run("cherry-pick", commit, "-X", "theirs", accept=(0, 1)).returncode:
        for path in git.changed("--diff-filter=U"):  # a file that one side removed
            gone = path not in git.files(commit)
            git.run(*(("rm", "-qf") if gone else ("checkout", commit)), "--", path)
        git.run("commit", "--quiet", "--allow-empty", "-C", commit)
    git.run("clean", "--quiet", "--force", "-d")


def show_trials(project: Project, target: Target) -> None:
    """Print the trials as Markdown: a row for each patch that does not simply apply."""
    trials, source = try_all(project, target), target.source
    verdicts = [trial.verdict for trial in trials]
    clean, conflict, contained = map(verdicts.count, (CLEAN, CONFLICT, CONTAINED))
    rows = [(f"`{n}`", verdict, "<br>".join(c)) for n, verdict, c in trials if verdict != CLEAN]
    print(f"## From vLLM {project.pin.version} onto {source.version}\n")
    print(
        f"{len(trials)} patches: {clean} apply, {conflict} conflict, {contained} are contained "
        f"already. Source: `{source.filename}`, sha256 `{source.sha256}`.\n"
    )
    print("\n".join(table(("Patch", "Verdict", "Where"), rows)) if rows else "")
