# SPDX-License-Identifier: Apache-2.0
"""The series on another release: rebased in a place of its own, put in place as one act.

That place, ``build/<line>/rebase``, has the new pin in ``patches`` and the commits in ``tree``.
"""

import argparse
import hashlib
import shutil
from pathlib import Path

from tools.common.cli import add_flag, add_path, tell
from tools.common.errors import ToolError
from tools.common.files import replace_all, staging
from tools.common.git import Git
from tools.common.pin import UNKNOWN, Project
from tools.series import merge, tree
from tools.series.apply import apply_series
from tools.series.export import export_series
from tools.series.merge import COMMAND, OLD_APPLIED, OLD_BASE
from tools.series.series import fingerprint, read_series
from tools.series.target import Target, find_target, open_clone, render_pin
from tools.series.tree import APPLIED_REF, BASE_REF, write_record
from tools.source.fetch import fetch

EXAMPLE = "--onto 1.2.3 --dry-run"
_STEPS = {
    "continue": "after the conflict was resolved",
    "skip": "leave the patch that it stopped at out of the series",
    "abort": "leave everything as it was before --onto",
}
_BEGIN = ("clone", "commit", "without-wheels", "dry-run")
_BEGAN = "re.began"  # in the configuration of the new tree: a digest of the old pin and series


def declare(parser: argparse.ArgumentParser) -> None:
    step = parser.add_mutually_exclusive_group(required=True)
    step.add_argument("--onto", metavar="VERSION_OR_REF", help="begin: a release, or a git ref")
    for flag, text in _STEPS.items():
        step.add_argument(f"--{flag}", dest="step", action="store_const", const=flag, help=text)
    add_flag(parser, "--drop-contained", "leave out what the release contains, and go on")
    begin = parser.add_argument_group("with --onto")
    add_path(begin, "--clone", "a clone of vLLM that has the ref or the tag")
    begin.add_argument("--commit", help="the commit of the release's tag, where no clone has it")
    add_flag(begin, "--without-wheels", "go on where a variant has no base wheel")
    add_flag(begin, "--dry-run", "only show what would conflict, as Markdown; change nothing")


def run(arguments: argparse.Namespace, project: Project) -> None:
    """Move the series to another vLLM: a release of the package index by version, or a git ref of
    a clone. Merges the patches one by one (git cherry-pick) in build/<line>/rebase and stops at a
    conflict, or at a patch that the target contains. At the end patches/<line> is replaced, with
    the pin (source, base wheels), all or nothing, and a range-diff is shown. Never pushes and never
    commits here."""
    new, under_way = rebased(project), state(project)
    if arguments.onto:
        if under_way:
            step = f"{COMMAND} --continue, or give it up: {COMMAND} --abort"
            raise ToolError("a rebase is under way already", found=under_way, next_step=step)
        begin(project, arguments)
        return
    if given := [f"--{name}" for name in _BEGIN if getattr(arguments, name.replace("-", "_"))]:
        what, found = "these belong to the beginning of a rebase", ", ".join(given)
        step = "leave them out, or begin again: --abort, then --onto"
        raise ToolError(what, f"--{arguments.step}", found=found, next_step=step)
    if under_way is None:
        step = f"begin one: {COMMAND} --onto <version>"
        raise ToolError("no rebase is under way", where=new.root, next_step=step)
    if arguments.step == "abort":
        abort(project, new)
        return
    if arguments.step == "skip":
        skip(new)
    go_on(project, new, arguments.drop_contained)


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
    done = f"{merge.count_done(git)} of {len(merge.old_commits(git))} patches done"
    picking = git.commit_id("CHERRY_PICK_HEAD")
    at = f", stopped at {git.subject(picking)}" if picking else ""
    return f"onto vLLM {new.pin.version} in {new.tree}: {done}{at}"


def _digest(project: Project) -> str:
    """A digest of the pin and the series, to notice edits made during a rebase."""
    series = fingerprint(read_series(project.series_file), project.pin)
    return hashlib.sha256(f"{series} {project.pin_file.read_text()}".encode()).hexdigest()


def begin(project: Project, arguments: argparse.Namespace) -> None:
    """Find the target, make the place of the rebase, completely or not at all, and start."""
    clone, new = arguments.clone, rebased(project)
    target = find_target(project, arguments.onto, clone, arguments.commit)
    print(f"onto: vLLM {target.version} ({target.tag}, commit {target.commit})")
    for what, file in {"source": target.source, **target.wheels}.items():
        said = f"{file.filename}, sha256 {file.sha256}" if file else "no base wheel"
        print(f"{what}: {said}")
    for note in target.notes:
        print(f"note: {note}")
    if target.source.sha256 == project.pin.source.sha256:
        print(f"nothing to do: the series stands on vLLM {target.version}")
        return
    if arguments.dry_run:
        print(merge.render_trials(try_all(project, target, clone), target, project.pin.version))
        return
    missing = [variant for variant, file in target.wheels.items() if file is None]
    if missing and not arguments.without_wheels:
        what, found = f"vLLM {target.version} lacks base wheels", f"none for {', '.join(missing)}"
        raise ToolError(what, found=found, next_step="go on without them: --without-wheels")
    with staging(new.root) as stage:
        set_up(project, target, clone, stage)
        stage.rename(new.root)
    go_on(project, new, arguments.drop_contained)


def set_up(project: Project, target: Target, clone: Path | None, stage: Path) -> Git:
    """In ``stage``: the series with the new pin, and a tree on the target with the old commits."""
    apply_series(project, read_series(project.series_file))  # refuses what would be lost
    new = rebased(project, stage)
    new.tree.mkdir()
    git, tree_id = tree.unpack_source(fetch(target.source, project), target.archive_only, new.tree)
    if clone and tree_id != (wanted := open_clone(clone).tree_id(target.commit)):
        what = "the source archive does not hold the files of the tag"
        expected = f"tree {wanted} of {target.tag} in {clone}"
        step = "add what the archive has beyond the tag to archive_only in upstream.toml"
        raise ToolError(what, target.source.filename, expected, f"tree {tree_id}", step)
    shutil.copytree(project.patches, new.patches, symlinks=True)
    text = render_pin(project.pin_file.read_text(encoding="utf-8"), target, tree_id)
    new.pin_file.write_text(text, encoding="utf-8")
    tree.commit_base(git, new.pin)
    git.fetch(project.tree, f"{BASE_REF}:{OLD_BASE}", f"{APPLIED_REF}:{OLD_APPLIED}")
    git.run("config", _BEGAN, _digest(project))
    return git


def try_all(project: Project, target: Target, clone: Path | None) -> list[merge.Trial]:
    """Try every patch, in a place that is gone afterwards."""
    series = read_series(project.series_file)
    trials: list[merge.Trial] = []
    with staging(rebased(project).root) as stage:
        git = set_up(project, target, clone, stage)
        for patch, commit in zip(series, merge.old_commits(git), strict=True):
            trials.append(merge.attempt(git, patch.name, commit))
            tell(f"[{len(trials):2}/{len(series)}] {patch.name}: {trials[-1].verdict}")
    return trials


def go_on(project: Project, new: Project, drop_contained: bool) -> None:
    """Merge what is left of the series, prove the result, put it in place."""
    git, before = Git(new.tree), project.pin
    if before != new.pin:
        if _digest(project) != git.text("config", _BEGAN):
            what = "the pin or the series changed since the rebase began; nothing is overwritten"
            step = f"put them back (git restore), or begin again: {COMMAND} --abort"
            raise ToolError(what, where=project.patches, next_step=step)
        names = [patch.name for patch in read_series(project.series_file)]
        merge.commit_resolution(git)
        merge.merge_all(git, names, f"vLLM {new.pin.version}", drop_contained)
        tell("writing the patches, and proving that they give back the commits")
        _prove(new, names)
        tree.refuse_unaccounted(tree.open_settled(project))
        made = {path.name: path.read_bytes() for path in new.patches.iterdir()}
        replace_all({project.patches / name: made.get(name) for name in {*names, *made}})
    # The new series is in place: what is left can be done again.
    series = read_series(project.series_file)
    _move_submodule(project, new)
    ranges = (f"{OLD_BASE}..{OLD_APPLIED}", f"{BASE_REF}..{APPLIED_REF}")
    print(git.text("-c", "core.abbrev=12", "range-diff", "--no-color", *ranges))
    if project.tree.exists():
        old = Git(project.tree)
        refs = (BASE_REF, APPLIED_REF, tree.EXPORTED_REF)
        old.fetch(new.tree, *(f"+{ref}:{ref}" for ref in refs))
        old.run("checkout", "--quiet", "-B", tree.BRANCH, APPLIED_REF)
        record = tree.Record(fingerprint(series, new.pin), old.tree_id(APPLIED_REF))
        write_record(old, record)
    print(f"rebased: {len(series)} patches onto vLLM {new.pin.version}")
    for name in merge.left_out(git):
        print(f"left out: {name}")
    print("next: make lock && make install && make test; then commit what changed")
    shutil.rmtree(new.root)


def _prove(new: Project, names: list[str]) -> None:
    """Export the merged commits and apply them again; refuse before anything is replaced."""
    try:
        export_series(new, drop=names)
        apply_series(new, read_series(new.series_file))
    except ToolError as error:
        what = "the result cannot be a series yet; nothing was replaced"
        step = f"correct its commits (git rebase --interactive {BASE_REF}), then: {COMMAND} "
        step += f"--continue; or give it up: {COMMAND} --abort"
        details = str(error).splitlines()
        raise ToolError(what, new.tree, next_step=step, details=details) from error


def skip(new: Project) -> None:
    """Leave the patch that the rebase stopped at out of the series."""
    git = Git(new.tree)
    if git.commit_id("CHERRY_PICK_HEAD") is None:
        step = f"{COMMAND} --continue"
        raise ToolError("the rebase did not stop at a patch", where=new.tree, next_step=step)
    name = read_series(new.series_file)[merge.count_done(git)].name
    contained = not git.differs("--cached", "HEAD")
    merge.leave_out(git, name, f"vLLM {new.pin.version} contains it" if contained else "skipped")


def abort(project: Project, new: Project) -> None:
    """Forget the rebase: nothing was changed but its own place."""
    if project.pin == new.pin:
        what = f"the rebase is finished: the new series is in place, {project.patches}"
        step = f"{COMMAND} --continue, then git restore what you want back"
        raise ToolError(what, next_step=step)
    shutil.rmtree(new.root)
    print("given up: the rebase; everything is as it was")


def _move_submodule(project: Project, new: Project) -> None:
    """Set the submodule's commit in the repository's index to that of the new pin."""
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
