# SPDX-License-Identifier: Apache-2.0
"""The prepared release of a commit; what is built depends on the commit alone."""

import argparse
import json
from pathlib import Path
from typing import Any
from urllib.parse import quote

from tools.common.cli import add_downloads
from tools.common.errors import ToolError
from tools.common.files import digest_of, staging
from tools.common.git import Git
from tools.common.pin import BaseWheel, Pin, Project
from tools.release.prepare import open_repository, read_tags, refuse_stale, section
from tools.series.series import Series, fingerprint
from tools.wheel.build import build_wheel
from tools.wheel.plan import tree_series, wheel_version
from tools.wheel.sbom import list_inputs, make_sbom
from tools.wheel.verify import verify_wheel

EXAMPLE = "--offline"
declare = add_downloads
# The pinned base wheel with the series laid over it: tools/wheel/plan.py.
BUILD_TYPE = "urn:vllm-routed-experts:overlay:v1"
# The bytes are the same wherever they are made, so no one machine is named.
BUILDER = "urn:vllm-routed-experts:builder:any"


def run(arguments: argparse.Namespace, project: Project) -> None:
    """Build the prepared release of this commit: wheels, proved; bills of materials; provenance
    (in-toto, SLSA); checksums. No wheel that is for tests only. All or nothing; the same commit
    gives the same bytes. Refuses uncommitted changes, a stale series, a release that is not
    prepared, and a version that is released already."""
    git, number, pin = open_repository(project), project.release, project.pin
    _refuse_released(git, number)
    notes = _prepared_notes(project, number)
    refuse_stale(project)
    _, series = tree_series(project)
    if not series:
        raise ToolError("there is nothing to release", found="no patches")
    commit, out = git.text("rev-parse", "HEAD"), project.build / "release" / f"re.{number}"
    with staging(out) as stage:
        for variant, base in _releasable(project).items():
            wheel = build_wheel(project, variant, stage)
            verify_wheel(project, wheel)
            sbom = make_sbom(pin, base, series, wheel_version(pin, base, number))
            provenance = make_provenance(pin, base, series, number, commit, wheel)
            (stage / f"{wheel.name}.cdx.json").write_bytes(sbom)
            (stage / f"{wheel.name}.intoto.json").write_bytes(provenance)
        (stage / "CHANGES.md").write_text(notes, encoding="utf-8")
        sums = {path.name: digest_of(path) for path in sorted(stage.iterdir())}
        lines = "".join(f"{digest}  {name}\n" for name, digest in sums.items())
        (stage / "SHA256SUMS").write_text(lines, encoding="utf-8")
        fresh = not out.exists()
        if fresh:
            stage.rename(out)
        else:
            _compare(out, stage)
    print(f"{'built' if fresh else 'built again, the same bytes'}: re.{number} in {out}")
    for path in sorted(out.iterdir()):
        print(f"  {path.name}")
    print("Nothing was tagged, pushed or published: do that yourself, and sign it:")
    print(f"next: git tag --annotate re.{number}")


def _refuse_released(git: Git, number: int) -> None:
    tags = read_tags(git)
    if number in tags and tags[number] != git.commit_id("HEAD"):
        what, found = "this version is released already", git.log(tags[number])
        step = "make release-prepare, or check out the tag to build it again"
        raise ToolError(what, f"the tag re.{number}", found=found, next_step=step)
    if number < (last := max(tags, default=0)):
        what, where = "a later version is released already", "pyproject.toml, [project].version"
        raise ToolError(what, where, f'"{last + 1}"', f'"{number}"', "make release-prepare")


def _prepared_notes(project: Project, number: int) -> str:
    """The section of the changelog, which must have a date."""
    changelog = project.root / "CHANGELOG.md"
    text = changelog.read_text(encoding="utf-8") if changelog.is_file() else ""
    state, notes = section(text, number) or ("no such section", "")
    if not notes or state == "unreleased":
        what, where = "this release is not prepared", f"CHANGELOG.md, re.{number}"
        raise ToolError(what, where, "a section with a date", state, "make release-prepare")
    return notes


def _releasable(project: Project) -> dict[str, BaseWheel]:
    pin = project.pin
    wheels = {variant: base for variant, base in pin.wheels.items() if not base.tests_only}
    if not wheels:
        what, expected = "this line has no wheel that may be released", f"one of vLLM {pin.version}"
        found = f"for tests only: {', '.join(pin.wheels) or 'none'}"
        raise ToolError(what, project.pin_file, expected, found)
    return wheels


def _compare(there: Path, made: Path) -> None:
    """Refuse to take the place of a release with other bytes."""
    old, new = ({(p.name, digest_of(p)) for p in place.iterdir()} for place in (there, made))
    if differing := sorted({name for name, _ in old ^ new}):
        what = "another release of this number lies there; it was left as it is"
        found = f"{len(differing)} files that differ from what this commit gives"
        step = "move it away, then run the command again"
        raise ToolError(what, there, found=found, next_step=step, details=differing)


def make_provenance(
    pin: Pin, base: BaseWheel, series: Series, release: int, commit: str, wheel: Path
) -> bytes:
    """The statement about one wheel: this repository's commit, then every input by digest.

    It is unsigned: whoever publishes signs it.
    """
    ours = {"name": "vllm-routed-experts", "digest": {"gitCommit": commit}}
    inputs: list[dict[str, Any]] = [ours]
    for name, digest, facts, file in list_inputs(pin, base, series):
        inputs.append({"name": name, "digest": {"sha256": digest}, "annotations": facts})
        if file:
            package = f"pkg:pypi/{file.distribution}@{file.version}"
            inputs[-1]["uri"] = f"{package}?file_name={quote(file.filename, safe='')}"
    command = f"python -m tools wheel build --on {pin.line} --variant {base.variant}"
    parameters = {
        **{"command": command, "variant": base.variant, "release": str(release)},
        "seriesFingerprint": fingerprint(series, pin),
    }
    definition = {"buildType": BUILD_TYPE, "externalParameters": parameters}
    statement = {
        "_type": "https://in-toto.io/Statement/v1",
        "subject": [{"name": wheel.name, "digest": {"sha256": digest_of(wheel)}}],
        "predicateType": "https://slsa.dev/provenance/v1",
        "predicate": {
            "buildDefinition": {**definition, "resolvedDependencies": inputs},
            "runDetails": {"builder": {"id": BUILDER}},
        },
    }
    return json.dumps(statement, indent=2, ensure_ascii=False).encode() + b"\n"
