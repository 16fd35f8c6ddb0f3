# SPDX-License-Identifier: Apache-2.0
"""The series on another release: git rebases it in a place of its own.

That place, ``build/<line>/rebase``, has the new pin in ``patches`` and the commits in ``tree``.
"""

import argparse
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from tools.common.cli import ToolError, add_flag, table, tell
from tools.common.files import staging, write
from tools.common.git import Git
from tools.common.pin import Project
from tools.series import tree
from tools.series.apply import apply_series
from tools.series.export import export_series
from tools.series.series import fingerprint, read_series
from tools.series.target import Target, find_target
from tools.series.tree import APPLIED_REF, BASE_REF, write_record
from tools.source.fetch import fetch

FINISH = "python -m tools series rebase --finish"
# The series on its old base, beside the new base.
OLD_BASE, OLD_APPLIED = "refs/re/old/base", "refs/re/old/applied"
OLD = f"{OLD_BASE}..{OLD_APPLIED}"
CLEAN, CONFLICT, CONTAINED = "clean", "conflict", "contained"
# The patch that a commit of the build tree is of.
_NAME = "%(trailers:key=Patch-Filename,valueonly)"


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
    under_way = state(project)
    if arguments.finish:
        if not under_way:
            step = "begin one: python -m tools series rebase --onto <version>"
            raise ToolError("no rebase is under way", rebased(project).root, next_step=step)
        finish(project)
    elif under_way:
        step = f"{FINISH}, or give it up: rm -r {rebased(project).root}"
        raise ToolError("a rebase is under way already", found=under_way, next_step=step)
    else:
        begin(project, arguments)


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
    at = f", stopped at {git.log('REBASE_HEAD', '%s')}" if git.commit_id("REBASE_HEAD") else ""
    return f"onto vLLM {new.pin.version} in {new.tree}{at}"


def begin(project: Project, arguments: argparse.Namespace) -> None:
    """Find the target, make the place of the rebase, completely or not at all, and start."""
    new, target = rebased(project), find_target(project, arguments.onto, arguments.commit)
    release = target.pin["release"]
    print(f"onto: vLLM {release['version']} ({release['tag']}, commit {release['commit']})")
    if target.source.sha256 == project.pin.source.sha256:
        print(f"nothing to do: the series stands on vLLM {release['version']}")
        return
    if arguments.dry_run:
        print(render_trials(try_all(project, target), target, project.pin.version))
        return
    with staging(new.root) as stage:
        set_up(project, target, stage)
        stage.rename(new.root)
    git = Git(new.tree)
    done = git.run(
        "rebase", "--empty=drop", "--onto", BASE_REF, OLD_BASE, OLD_APPLIED, accept=(0, 1)
    )
    if done.returncode:
        what, at = (
            f"a patch conflicts with vLLM {release['version']}",
            git.log("REBASE_HEAD", _NAME),
        )
        steps = [
            f"edit and git add them in {git.path}, then: git rebase --continue",
            "to leave the patch out: git rebase --skip",
            f"when git is done: {FINISH}",
            f"to give up: rm -r {new.root}",
        ]
        raise ToolError(what, at, details=[*conflicts_in(done.stdout), *steps])
    finish(project)


def set_up(project: Project, target: Target, stage: Path) -> Git:
    """In ``stage``: the series with the new pin, and a tree on the target with the old commits."""
    apply_series(project, read_series(project.series_file))  # refuses what would be lost
    new, archive_only = rebased(project, stage), target.pin["source"]["archive_only"]
    new.tree.mkdir()
    git, tree_id = tree.unpack_source(fetch(target.source, project), archive_only, new.tree)
    shutil.copytree(project.patches, new.patches, symlinks=True)
    new.pin_file.write_text(target.render(tree_id), encoding="utf-8")
    tree.commit_base(git, new.pin)
    git.fetch(project.tree, f"{BASE_REF}:{OLD_BASE}", f"{APPLIED_REF}:{OLD_APPLIED}")
    # Also for the person who goes on. Lines of a message may begin with "#".
    for setting in ("merge.conflictStyle diff3", "core.commentChar ;"):
        git.run("config", *setting.split())
    return git


def finish(project: Project) -> None:
    """Check the series that git made, replace the old series with it, and print what changed."""
    new = rebased(project)
    git = Git(new.tree)
    names = git.text("log", "--reverse", f"--format={_NAME}", OLD).split()
    tell(f"checking the patches; if one is wrong, correct it in {new.tree}, then: {FINISH}")
    if names:  # a line begins with none
        export_series(new, drop=names)
    series = read_series(new.series_file)
    apply_series(new, series)
    apply_series(project, read_series(project.series_file))  # refuses what would be lost
    built = Git(project.tree)
    if built.commit_id(APPLIED_REF) != git.commit_id(OLD_APPLIED):
        what = "the series changed since the rebase began; nothing is overwritten"
        step = f"put it back (git restore), or begin again: rm -r {new.root}"
        raise ToolError(what, where=project.patches, next_step=step)
    for name in names:
        (project.patches / name).unlink()
    for path in new.patches.iterdir():
        write(project.patches / path.name, path.read_bytes())
    refs = filter(git.commit_id, (BASE_REF, APPLIED_REF, tree.EXPORTED_REF))
    built.fetch(new.tree, *(f"+{ref}:{ref}" for ref in refs))
    built.run("checkout", "--quiet", "-B", tree.BRANCH, APPLIED_REF)
    write_record(built, tree.Record(fingerprint(series, new.pin), built.tree_id(APPLIED_REF)))
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
            trials.append(Trial(git.log(commit, _NAME), *_attempt(git, commit)))
            tell(f"{trials[-1].name}: {trials[-1].verdict}")
    return trials


def _attempt(git: Git, commit: str) -> tuple[str, list[str]]:
    """Try one patch on HEAD; a conflict is resolved in favour of the patch for those after it."""
    done = git.run("cherry-pick", commit, accept=(0, 1))
    if done.returncode == 0:
        return CLEAN, []
    verdict = CONFLICT if git.changed("--cached", "HEAD") else CONTAINED
    git.run("cherry-pick", "--abort")
    if (
        verdict == CONFLICT
        and git.run("cherry-pick", commit, "-X", "theirs", accept=(0, 1)).returncode
    ):
        for path in git.changed("--diff-filter=U"):  # a file that one side removed
            gone = git.read(commit, path) is None
            git.run(*(("rm", "-qf") if gone else ("checkout", commit)), "--", path)
        git.run("commit", "--quiet", "--allow-empty", "-C", commit)
    git.run("clean", "--quiet", "--force", "-d")
    return verdict, conflicts_in(done.stdout)


def render_trials(trials: Sequence[Trial], target: Target, before: str) -> str:
    """The trials as Markdown: a row for each patch that does not simply apply."""
    verdicts = [trial.verdict for trial in trials]
    clean, conflict, contained = map(verdicts.count, (CLEAN, CONFLICT, CONTAINED))
    rows = [(f"`{n}`", verdict, "<br>".join(c)) for n, verdict, c in trials if verdict != CLEAN]
    cells = "\n".join(table(("Patch", "Verdict", "Where"), rows)) if rows else ""
    return (
        f"## From vLLM {before} onto {target.source.version}\n\n"
        f"{len(trials)} patches: {clean} apply, {conflict} conflict, {contained} are contained "
        f"already. Source: `{target.source.filename}`, sha256 `{target.source.sha256}`.\n\n{cells}"
    )
