# SPDX-License-Identifier: Apache-2.0
"""Status report: which pin, how much of the series is applied, what changed since."""

import argparse
import contextlib
import re
from collections.abc import Iterator

from packaging.version import Version

from tools.common.cli import ToolError, add_flag, count
from tools.common.git import Git
from tools.common.pin import Project, lines
from tools.series.series import Series, fingerprint, read_series
from tools.series.tree import open_tree, read_record, record, unaccounted
from tools.source.fetch import Index, releases

# As "series: 0123456789abcdef" or "series of 3 patches (`0123456789abcdef`)".
_STATED = re.compile(r"\bseries\b.{0,60}?\b([0-9a-f]{16})\b", re.IGNORECASE)


def declare(parser: argparse.ArgumentParser) -> None:
    add_flag(parser, "--table", "only a table of the patches, in Markdown")


def run(arguments: argparse.Namespace, project: Project) -> None:
    """Show the state of the series: pin, newest release, what is applied, what drifted. Names
    records of another series. Works without a network: then the newest release is unknown.
    patches/<line>/README.md lists the patches."""
    if arguments.table:
        print(table(project), end="")
        return
    for what, said in report(project):
        print(f"{what:<9} {said}")


def report(project: Project) -> Iterator[tuple[str, str]]:
    """Topics and texts; a problem with one does not hide the others."""
    pin = project.pin
    yield "pin", f"vLLM {pin.version}, {pin.tag}, commit {pin.commit}"
    yield "source", f"{pin.source.filename}, sha256 {pin.source.sha256[:16]}..."
    yield "newest", newest_release(project)
    try:
        series = read_series(project.series_file)
    except ToolError as error:
        yield "series", f"cannot be read: {error.what}"
        return
    number = count(len(series), "patch", "patches")
    yield "series", f"{number}, fingerprint {fingerprint(series, pin)[:16]}..."
    try:
        drift = "; ".join(_drift(open_tree(project), project, series))
        yield "applied", f"in {project.tree}, but {drift}" if drift else f"in {project.tree}"
    except ToolError as error:
        yield "applied", f"no: {error.what} ({project.tree})"
    if old := old_records(project):
        yield "records", f"of another series: {', '.join(old)}"


def table(project: Project) -> str:
    """What each patch does, needs and changes, and where it stands upstream. Deterministic."""
    top = [f"# The {project.line} patches", ""]
    top += ["In their order. `make export` writes this table.", ""]
    top += ["| Patch | What | Needs | Lines | Upstream |", "| --- | --- | --- | --- | --- |"]
    for patch in read_series(project.series_file):
        name, what = patch.name.removesuffix(".patch"), re.sub(r"^(\[.*?\])+ *", "", patch.subject)
        needs = ", ".join(needed.removesuffix(".patch") for needed in patch.needs)
        size = f"+{patch.diff.added} -{patch.diff.removed}"
        threads = [t for t in re.findall(r"\bvllm#\d+", patch.body) if t not in patch.status]
        upstream = ", ".join([patch.status, *dict.fromkeys(threads)])
        top.append(f"| [{name}]({patch.name}) | {what} | {needs} | {size} | {upstream} |")
    return "\n".join(top) + "\n"


def newest_release(project: Project) -> str:
    """The newest release, and how many came after the pinned one; unknown without an answer."""
    try:
        known = releases(Index().files(project.pin.source.distribution))
    except ToolError as error:
        return f"unknown: {error.what}"
    ahead = [version for version in known if version > Version(project.pin.version)]
    if not ahead:
        return f"{project.pin.version}, the pinned one"
    return f"{ahead[-1]}, {count(len(ahead), 'release')} after the pinned one"


def old_records(project: Project) -> list[str]:
    """Records that state the first 16 digits of a fingerprint of no line's series today."""
    top = project.root / "benchmarks/results"
    found = []
    today = set[str]()
    for line in (Project(project.root, name) for name in lines(project.root)):
        with contextlib.suppress(ToolError):  # the status of that line tells of it
            today.add(fingerprint(read_series(line.series_file), line.pin)[:16])
    for path in sorted(top.rglob("*.md")):
        if not today.issuperset(_STATED.findall(path.read_text())):
            found.append(path.relative_to(top).as_posix())
    return found


def _drift(git: Git, project: Project, series: Series) -> Iterator[str]:
    if dirt := git.dirt():
        yield f"{count(len(dirt), 'file')} changed and not committed in the build tree"
    if lost := unaccounted(git):
        subjects = ", ".join(git.log(commit, "%s") for commit in lost)
        yield f"{count(len(lost), 'commit')} not exported: {subjects}"
    if read_record(git) != record(git, series, project.pin):
        yield "it is not the series as it is now"
