# SPDX-License-Identifier: Apache-2.0
"""The series on another release: git rebases it in a place of its own.

That place, ``build/<line>/rebase``, has the new pin in ``patches`` and the commits in ``tree``.
"""

import argparse
import hashlib
import shutil
from collections.abc import Sequence
from pathlib import Path
from subprocess import CompletedProcess
from typing import NamedTuple

from tools.common.cli import ToolError, add_flag, add_path, table, tell
from tools.common.files import staging, write
from tools.common.git import Git
from tools.common.pin import UNKNOWN, Project
from tools.series import tree
from tools.series.apply import apply_series
from tools.series.export import export_series
from tools.series.series import fingerprint, read_series
from tools.series.target import Target, find_target, open_clone
from tools.series.tree import APPLIED_REF, BASE_REF, write_record
from tools.source.fetch import fetch

COMMAND = "python -m tools series rebase"
# The series on its old base, beside the new base.
OLD_BASE, OLD_APPLIED = "refs/re/old/base", "refs/re/old/applied"
CLEAN, CONFLICT, CONTAINED = "clean", "conflict", "contained"
_STEPS = {
    "continue": "after the conflict was resolved",
    "skip": "leave the patch that it stopped at out of the series",
    "abort": "leave everything as it was before --onto",
}
_BEGAN = "re.began"  # in the configuration of the new tree: a digest of the old pin and series
# The patch that a commit of the build tree is of.
_NAME = "%(trailers:key=Patch-Filename,valueonly)"
# diff3 shows the old release's lines too.
_MERGE = ("-c", "merge.conflictStyle=diff3")


def declare(parser: argparse.ArgumentParser) -> None:
    step = parser.add_mutually_exclusive_group(required=True)
    step.add_argument("--onto", metavar="VERSION_OR_REF", help="begin: a release, or a git ref")
    for flag, text in _STEPS.items():
        step.add_argument(f"--{flag}", dest="step", action="store_const", const=flag, help=text)
    begin = parser.add_argument_group("with --onto")
    add_flag(begin, "--drop-contained", "leave out what the release contains, and go on")
    of_release = begin.add_mutually_exclusive_group()
    add_path(of_release, "--clone", "a clone of vLLM that has the ref or the tag")
    of_release.add_argument("--commit", help="the commit of the release's tag, without a clone")
    add_flag(begin, "--without-wheels", "go on where a variant has no base wheel")
    add_flag(begin, "--dry-run", "only show what would conflict, as Markdown; change nothing")


def run(arguments: argparse.Namespace, project: Project) -> None:
    """Move the series to another vLLM: a release of the package index by version, or a git ref of
    a clone. Runs git rebase in build/<line>/rebase and stops at a conflict, or at a patch that the
    target contains. At the end patches/<line> is replaced, with the pin (source, base wheels), and
    a range-diff is shown. Never pushes and never commits here."""
    new, under_way, step = rebased(project), state(project), arguments.step
    if arguments.onto and under_way:
        what, do = "a rebase is under way already", f"{COMMAND} --continue, or give it up: "
        raise ToolError(what, found=under_way, next_step=f"{do}{COMMAND} --abort")
    if arguments.onto:
        begin(project, arguments)
    elif under_way is None:
        do = f"begin one: {COMMAND} --onto <version>"
        raise ToolError("no rebase is under way", where=new.root, next_step=do)
    elif step != "abort":
        go_on(project, new, step)
    elif project.pin == new.pin:
        what, do = "the new series is in place already", f"{COMMAND} --continue, then git restore"
        raise ToolError(what, project.patches, next_step=do)
    else:
        shutil.rmtree(new.root)
        print("given up: the rebase; everything is as it was")


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
    at = f", stopped at {git.subject('REBASE_HEAD')}" if git.commit_id("REBASE_HEAD") else ""
    return f"onto vLLM {new.pin.version} in {new.tree}{at}"


def _digest(project: Project) -> str:
    """A digest of the pin and the series, to notice edits made during a rebase."""
    series = fingerprint(read_series(project.series_file), project.pin)
    return hashlib.sha256(f"{series} {project.pin_file.read_text()}".encode()).hexdigest()


def begin(project: Project, arguments: argparse.Namespace) -> None:
    """Find the target, make the place of the rebase, completely or not at all, and start."""
    clone, new = arguments.clone, rebased(project)
    target = find_target(project, arguments.onto, clone, arguments.commit)
    release = target.pin["release"]
    print(f"onto: vLLM {release['version']} ({release['tag']}, commit {release['commit']})")
    for note in target.notes:
        print(f"note: {note}")
    if target.source.sha256 == project.pin.source.sha256:
        print(f"nothing to do: the series stands on vLLM {release['version']}")
        return
    if arguments.dry_run:
        print(render_trials(try_all(project, target, clone), target, project.pin.version))
        return
    wheels = target.pin.get("wheel", {})
    missing = [variant for variant, file in wheels.items() if "filename" not in file]
    if missing and not arguments.without_wheels:
        what, found = f"vLLM {release['version']} lacks base wheels", ", ".join(missing)
        step = "go on without them: --without-wheels"
        raise ToolError(what, found=f"none for {found}", next_step=step)
    with staging(new.root) as stage:
        set_up(project, target, clone, stage)
        stage.rename(new.root)
    go_on(project, new, "drop" if arguments.drop_contained else "ask")


def set_up(project: Project, target: Target, clone: Path | None, stage: Path) -> Git:
    """In ``stage``: the series with the new pin, and a tree on the target with the old commits."""
    apply_series(project, read_series(project.series_file))  # refuses what would be lost
    new, archive_only = rebased(project, stage), target.pin["source"]["archive_only"]
    new.tree.mkdir()
    git, tree_id = tree.unpack_source(fetch(target.source, project), archive_only, new.tree)
    release = target.pin["release"]
    if clone and tree_id != (wanted := open_clone(clone).tree_id(release["commit"])):
        what = "the source archive does not hold the files of the tag"
        expected = f"tree {wanted} of {release['tag']} in {clone}"
        step = "add what the archive has beyond the tag to archive_only in upstream.toml"
        raise ToolError(what, target.source.filename, expected, f"tree {tree_id}", step)
    shutil.copytree(project.patches, new.patches, symlinks=True)
    new.pin_file.write_text(target.render(tree_id), encoding="utf-8")
    tree.commit_base(git, new.pin)
    git.fetch(project.tree, f"{BASE_REF}:{OLD_BASE}", f"{APPLIED_REF}:{OLD_APPLIED}")
    git.run("config", _BEGAN, _digest(project))
    return git


def go_on(project: Project, new: Project, step: str) -> None:
    """Rebase what is left of the series, prove the result, put it in place. ``step``: ``continue``
    or ``skip``; at the beginning what becomes of a patch that the release contains."""
    git = Git(new.tree)
    old = f"{OLD_BASE}..{OLD_APPLIED}"
    names = git.text("log", "--reverse", f"--format={_NAME}", old).split()
    if project.pin != new.pin:
        if _digest(project) != git.text("config", _BEGAN):
            what = "the pin or the series changed since the rebase began; nothing is overwritten"
            step = f"put them back (git restore), or begin again: {COMMAND} --abort"
            raise ToolError(what, where=project.patches, next_step=step)
        git_rebase(git, f"vLLM {new.pin.version}", step)
        tell("writing the patches, and proving that they give back the commits")
        _prove(new, names)
        tree.refuse_unaccounted(tree.open_settled(project))
        for name in names:
            (project.patches / name).unlink(missing_ok=True)
        # The pin last: it says that the new series is in place.
        for path in sorted(new.patches.iterdir(), key=lambda path: path == new.pin_file):
            write(project.patches / path.name, path.read_bytes())
    # The new series is in place: what is left can be done again.
    series = read_series(project.series_file)
    _move_submodule(project, new)
    if series:
        ranges = (old, f"{BASE_REF}..{APPLIED_REF}")
        print(git.text("-c", "core.abbrev=12", "range-diff", "--no-color", *ranges))
    if project.tree.exists():
        built = Git(project.tree)
        refs = filter(git.commit_id, (BASE_REF, APPLIED_REF, tree.EXPORTED_REF))
        built.fetch(new.tree, *(f"+{ref}:{ref}" for ref in refs))
        built.run("checkout", "--quiet", "-B", tree.BRANCH, APPLIED_REF)
        record = tree.Record(fingerprint(series, new.pin), built.tree_id(APPLIED_REF))
        write_record(built, record)
    print(f"rebased: {len(series)} patches onto vLLM {new.pin.version}")
    kept = {patch.name for patch in series}
    for name in (name for name in names if name not in kept):
        print(f"left out: {name}")
    print("next: make lock && make install && make test; then commit what changed")
    shutil.rmtree(new.root)


def git_rebase(git: Git, release: str, step: str) -> None:
    """Let git put the old commits onto the new base, or go on with it, and say why it stopped."""

    def do(*words: str) -> CompletedProcess[bytes]:
        # Lines of a message may begin with "#".
        settings = (*_MERGE, "-c", "core.commentChar=;")
        return git.run(*settings, "rebase", *words, env={"GIT_EDITOR": "true"}, accept=(0, 1))

    stopped = git.path / ".git/rebase-merge"
    if step == "skip":
        git.run("clean", "--quiet", "--force", "-d")
        done = do("--skip")
    elif stopped.exists():
        take_resolution(git)
        done = do("--continue")
    elif git.commit_id("HEAD") == git.commit_id(BASE_REF):
        empty = "ask" if step == "continue" else step
        done = do(f"--empty={empty}", "--onto", BASE_REF, OLD_BASE, OLD_APPLIED)
    else:
        return
    if done.returncode:
        at = git.log("REBASE_HEAD", _NAME) if stopped.exists() else git.path
        conflicts = conflicts_in(done)
        what, do_this = f"a patch conflicts with {release}", "edit them (git add what is new)"
        if not git.differs("--cached", "HEAD"):
            what, do_this = f"{release} contains a patch already", "change something"
        said = (done.stdout + done.stderr).decode(errors="replace").splitlines()
        raise ToolError(
            what,
            at,
            next_step=f"{do_this} in {git.path}, then: {COMMAND} --continue",
            details=[
                *(conflicts or said),
                f"to leave the patch out: {COMMAND} --skip",
                f"to leave everything as it was: {COMMAND} --abort",
            ],
        )
    git.run("checkout", "--quiet", "-B", tree.BRANCH)


def conflicts_in(done: CompletedProcess[bytes]) -> list[str]:
    """Git's words on each conflict."""
    said = done.stdout.decode(errors="replace").splitlines()
    return [line.removeprefix("CONFLICT ") for line in said if line.startswith("CONFLICT ")]


def take_resolution(git: Git) -> None:
    """Stage what a person made of the patch that the rebase stopped at; refuse what is not one."""
    said = git.text("diff", "--check", "HEAD", accept=(0, 2)).splitlines()
    if marked := [line for line in said if line.endswith("leftover conflict marker")]:
        step = f"edit these files, then: {COMMAND} --continue"
        raise ToolError("conflict markers are left", git.path, next_step=step, details=marked)
    git.run("add", "--update", ".")
    # Git would leave the patch out without a word. No message: it was committed by hand.
    if (git.path / ".git/MERGE_MSG").exists() and not git.differs("--cached", "HEAD"):
        step = f"leave it out: {COMMAND} --skip; or change something, then: --continue"
        where = f"{git.path}, {git.subject('REBASE_HEAD')}"
        raise ToolError("nothing is left of a patch", where, next_step=step)


def _prove(new: Project, names: list[str]) -> None:
    """Export the rebased commits and apply them again; refuse before anything is replaced."""
    try:
        if names:  # a line begins with none
            export_series(new, drop=names)
        apply_series(new, read_series(new.series_file))
    except ToolError as error:
        what = "the result cannot be a series yet; nothing was replaced"
        step = f"correct its commits (git rebase --interactive {BASE_REF}), then: {COMMAND} "
        step += f"--continue; or give it up: {COMMAND} --abort"
        details = str(error).splitlines()
        raise ToolError(what, new.tree, next_step=step, details=details) from error


def _move_submodule(project: Project, new: Project) -> None:
    """Set the submodule's commit in the repository's index as the new pin says."""
    name, commit = new.pin.submodule, new.pin.commit
    if name is None or not (project.root / ".git").exists():
        return
    git = Git(project.root)
    if not git.text("ls-files", "--stage", "--", name).startswith("160000 "):
        return
    if commit == UNKNOWN:
        print(f"note: the commit of the submodule {name}/ was left as it was")
    else:
        git.run("update-index", "--cacheinfo", f"160000,{commit},{name}")


class Trial(NamedTuple):
    """What happens to a patch when those before it are resolved in their own favour."""

    name: str
    verdict: str  # CLEAN, CONTAINED or CONFLICT
    conflicts: list[str]


def try_all(project: Project, target: Target, clone: Path | None) -> list[Trial]:
    """Try every patch, in a place that is gone afterwards."""
    series = read_series(project.series_file)
    trials: list[Trial] = []
    with staging(rebased(project).root) as stage:
        git = set_up(project, target, clone, stage)
        commits = git.commits(f"{OLD_BASE}..{OLD_APPLIED}")
        for patch, commit in zip(series, commits, strict=True):
            trials.append(Trial(patch.name, *_attempt(git, commit)))
            tell(f"[{len(trials):2}/{len(series)}] {patch.name}: {trials[-1].verdict}")
    return trials


def _attempt(git: Git, commit: str) -> tuple[str, list[str]]:
    """Try one patch on HEAD; a conflict is resolved in favour of the patch for those after it."""
    pick = (*_MERGE, "cherry-pick", commit)
    done = git.run(*pick, accept=(0, 1))
    if done.returncode == 0:
        return CLEAN, []
    verdict = CONFLICT if git.differs("--cached", "HEAD") else CONTAINED
    git.run("cherry-pick", "--abort")
    if verdict == CONFLICT and git.run(*pick, "-X", "theirs", accept=(0, 1)).returncode:
        for path in git.unmerged():  # a file that one side removed
            gone = git.read(commit, path) is None
            git.run(*(("rm", "-qf") if gone else ("checkout", commit)), "--", path)
        git.run("commit", "--quiet", "--allow-empty", "-C", commit)
    git.run("clean", "--quiet", "--force", "-d")
    return verdict, conflicts_in(done)


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
