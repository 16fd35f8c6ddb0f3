# SPDX-License-Identifier: Apache-2.0
"""A new line: another line's series, rebased onto another release."""

import argparse
import shutil
from pathlib import Path

from tools.common.cli import ToolError, count
from tools.common.pin import Project
from tools.series.rebase import CONFLICT, begin, find_target, rebased, try_all


def declare(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--from", dest="other", metavar="LINE", required=True, help="begin with it")
    parser.add_argument("--commit", help="the commit of the release's tag")


def run(arguments: argparse.Namespace, project: Project) -> None:
    """Begin a line of patches/ from another one. `--on` names the new line, as v1.2.3 for 1.2.3.
    The command copies the pin, the series and the inputs of the locks, says which patches conflict
    with the release, and rebases the series. At a conflict it stops, and says how to go on. Any
    other error leaves nothing behind."""
    other = Project(project.root, arguments.other, project.wheelhouse, project.offline)
    version = project.line.removeprefix("v")
    target = find_target(other, version, arguments.commit)
    if project.line != f"v{version}":
        what = "a line is named for its release"
        raise ToolError(what, "--on", f"v{version}", project.line)
    if project.patches.exists():
        step = "name another release, or move it: python -m tools series rebase"
        raise ToolError("the line is there already", project.patches, next_step=step)
    trials = try_all(other, target)
    conflicts = [trial for trial in trials if trial.verdict == CONFLICT]
    print(
        f"{count(len(trials), 'patch', 'patches')}: {len(conflicts)} conflict with vLLM {version}"
    )
    for trial in conflicts:
        print(f"  {trial.name}: {'; '.join(trial.conflicts)}")
    try:
        copy(other, project)
        begin(project, target, dry_run=False)
    except BaseException:
        if not rebased(project).root.exists():  # no conflict: nothing to go on with
            for folder in (project.patches, inputs(project)):
                shutil.rmtree(folder, ignore_errors=True)
        raise
    print(f"next: make lock ON={project.line}; then CONTRIBUTING.md, 'Adding a line'")


def inputs(project: Project) -> Path:
    return project.root / "requirements" / project.line


def copy(other: Project, project: Project) -> None:
    """The other line's patches and locks. The inputs of the locks name the new line's tree."""
    table = shutil.ignore_patterns("README.md")  # of the other line; the export writes the new one
    shutil.copytree(other.patches, project.patches, symlinks=True, ignore=table)
    if not inputs(other).is_dir():
        return
    shutil.copytree(inputs(other), inputs(project))
    for path in inputs(project).glob("*.in"):
        text = path.read_text(encoding="utf-8")
        path.write_text(text.replace(f"build/{other.line}/", f"build/{project.line}/"), "utf-8")
