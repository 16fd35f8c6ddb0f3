# SPDX-License-Identifier: Apache-2.0
"""vLLM's own tests, on the pristine and on the patched wheel, test by test.

Each wheel is tested with the tests of its own tree. What differs must be the series' own doing: a
test that it adds, removes or changes.
"""

from __future__ import annotations

import ast
import hashlib
import io
import shutil
import tarfile
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from tools.common.git import Git
from tools.series.base import BASE_REF
from tools.upstream.hubcache import recipe
from tools.upstream.testrun import PASSED, SKIPPED, Outcome, Results, run_file, test_environment

# What the tests need of a tree; not vllm/, which would stand before the installed wheel.
PARTS = ("tests", "examples", "pyproject.toml")
LIMIT_S = 600

SAME = "same"
ADDED = "added by the series"
REMOVED = "removed by the series"
CHANGED = "changed by the series"
FIXED = "fixed"
BROKEN = "broken"
OTHER = "differs"
# Differences that the series' own tests do not account for.
UNEXPLAINED = (FIXED, BROKEN, OTHER)


@dataclass(frozen=True)
class Side:
    """A wheel and the tree that it was made of.

    ``site`` is the directory it is installed in; None: this Python's own.
    """

    name: str
    git: Git
    site: Path | None

    def key(self) -> str:
        """What decides the results: package, tests, stand-ins."""
        parts = [self.git.text("rev-parse", f"HEAD:{part}") for part in ("vllm", "tests")]
        return hashlib.sha256("\n".join([*parts, recipe()]).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Comparison:
    """One test on both wheels; None where it does not exist."""

    file: str
    test: str
    pristine: Outcome | None
    patched: Outcome | None
    verdict: str


def run_side(
    side: Side, files: Iterable[str], build: Path, told: Callable[[str, str, Results], None]
) -> dict[str, Results]:
    """Run the files that exist on this side; what an earlier run finished is not run again.

    ``told`` is called with side, file and results when a file ends.
    """
    there = side.git.files("HEAD", "tests")
    tree = build / side.name
    _unpack(side.git, tree)
    more = {"PYTHONPATH": str(side.site.resolve())} if side.site else {}
    environment = test_environment(build, **more)
    found = {}
    for file in files:
        if file not in there:
            continue
        results = build / "results" / side.key() / Path(file).with_suffix(".xml")
        found[file] = run_file(file, tree, environment, results, LIMIT_S)
        told(side.name, file, found[file])
    return found


def _unpack(git: Git, into: Path) -> None:
    shutil.rmtree(into, ignore_errors=True)
    parts = [part for part in PARTS if git.files("HEAD", part)]
    archive = git.run("archive", "--format=tar", "HEAD", "--", *parts).stdout
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        tar.extractall(into, filter="data")


def touched_tests(git: Git) -> dict[str, set[str] | None]:
    """Names of the tests that the series adds, changes or removes, by file.

    None stands for the whole file: it was added or removed, or something that its tests share was
    changed.
    """
    found: dict[str, set[str] | None] = {}
    for change in git.changes(BASE_REF, "HEAD"):
        if not change.path.startswith("tests/") or not change.path.endswith(".py"):
            continue
        if change.status != "M":
            found[change.path] = None
            continue
        blobs = git.contents([change.before, change.after])
        before, after = (_parts(blobs[blob]) for blob in (change.before, change.after))
        names = {name for name in before | after if before.get(name) != after.get(name)}
        found[change.path] = None if "" in names else names
    return found


def _parts(source: bytes) -> dict[str, str]:
    """The tests of a module by name, and under the empty name all the rest."""
    parts = {"": ""}
    for node in ast.parse(source).body:
        inner = node.body if isinstance(node, ast.ClassDef) else [node]
        for part in inner:
            name = getattr(part, "name", "")
            name = name if name.startswith("test") else ""
            parts[name] = parts.get(name, "") + ast.dump(part)
    return parts


def compare(
    pristine: dict[str, Results],
    patched: dict[str, Results],
    touched: dict[str, set[str] | None],
) -> list[Comparison]:
    """Every test of both sides, with what its difference is called."""
    found = []
    for file in sorted(pristine.keys() | patched.keys()):
        before, after = pristine.get(file, {}), patched.get(file, {})
        for test in sorted(before.keys() | after.keys()):
            pair = before.get(test), after.get(test)
            names = touched.get(file, set())
            function = test.partition("[")[0].rpartition("::")[2]
            ours = names is None or function in names
            found.append(Comparison(file, test, *pair, _verdict(*pair, ours)))
    return found


def _verdict(before: Outcome | None, after: Outcome | None, ours: bool) -> str:
    """What a difference is called; ``ours``: the series touches this very test."""
    if before and after and before.status == after.status and before.reason == after.reason:
        return SAME
    if after and after.bad and not after.cannot_run:
        return BROKEN
    if ours:
        return ADDED if before is None else REMOVED if after is None else CHANGED
    if before and after and before.bad and after.status == PASSED:
        return FIXED
    if before and before.status == PASSED:
        return BROKEN
    return OTHER


def render(comparisons: list[Comparison], about: str) -> str:
    """The record of a comparison, as Markdown."""
    lines = ["# vLLM's own tests on the pristine and on the patched wheel", "", about, ""]
    lines += [
        "Passed / cannot run here / failed otherwise / skipped.",
        "",
        "| File | Pristine | Patched | Same | Differences |",
        "| --- | --- | --- | --- | --- |",
    ]
    files = sorted({c.file for c in comparisons})
    for file in [*files, "All"]:
        of_file = [c for c in comparisons if file in (c.file, "All")]
        verdicts = Counter(c.verdict for c in of_file)
        same = verdicts.pop(SAME, 0)
        differences = ", ".join(f"{count} {verdict}" for verdict, count in sorted(verdicts.items()))
        pristine = _counts(c.pristine for c in of_file)
        patched = _counts(c.patched for c in of_file)
        name = f"`{file.removeprefix('tests/')}`" if file != "All" else file
        lines.append(f"| {name} | {pristine} | {patched} | {same} | {differences or 'none'} |")
    lines += ["", "## Differences", ""]
    different = [c for c in comparisons if c.verdict != SAME]
    if different:
        lines += ["| Test | Pristine | Patched | Verdict |", "| --- | --- | --- | --- |"]
        lines += [
            f"| `{_short(name)}`{f' ({len(group)} cases)' if len(group) > 1 else ''} | {before} "
            f"| {after} | {verdict} |"
            for (name, before, after, verdict), group in _grouped(different).items()
        ]
    else:
        lines.append("None.")
    lines += ["", "## Tests that cannot pass here, and why", ""]
    lines += ["| Tests | Why | What the failure says |", "| --- | --- | --- |"]
    failing: Counter[tuple[str, str, str]] = Counter()
    for c in comparisons:
        outcome = c.patched or c.pristine
        if outcome and outcome.bad:
            function = _short(c.test).partition("[")[0]
            failing[function, outcome.cannot_run or "see right", outcome.reason] += 1
    lines += [
        f"| `{name}`{f' ({count})' if count > 1 else ''} | {why} | {_cell(reason)} |"
        for (name, why, reason), count in sorted(failing.items())
    ]
    return "\n".join(lines) + "\n"


def _grouped(
    comparisons: Iterable[Comparison],
) -> dict[tuple[str, str, str, str], list[Comparison]]:
    """Cases of one test that differ in the same way, together."""
    groups: dict[tuple[str, str, str, str], list[Comparison]] = {}
    for c in comparisons:
        row = (c.test.partition("[")[0], _status(c.pristine), _status(c.patched), c.verdict)
        groups.setdefault(row, []).append(c)
    return groups


def _status(outcome: Outcome | None) -> str:
    if outcome is None:
        return "not there"
    return f"{outcome.status}: {_cell(outcome.reason)}" if outcome.bad else outcome.status


def _counts(outcomes: Iterable[Outcome | None]) -> str:
    there = [outcome for outcome in outcomes if outcome is not None]
    if not there:
        return "not there"
    passed = sum(o.status == PASSED for o in there)
    cannot = sum(o.cannot_run is not None for o in there)
    failed = sum(o.bad and o.cannot_run is None for o in there)
    skipped = sum(o.status == SKIPPED for o in there)
    return f"{passed} / {cannot} / {failed} / {skipped}"


def _short(test: str) -> str:
    return test.removeprefix("tests.").replace("|", "\\|")


def _cell(text: str) -> str:
    """Text that breaks no table and is no markup."""
    return f"`{text.replace('|', '¦').replace('`', chr(39))}`" if text else ""
