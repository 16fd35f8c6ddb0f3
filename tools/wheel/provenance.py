# SPDX-License-Identifier: Apache-2.0
"""Where a wheel came from: its bill of materials and its provenance, as files beside it."""

import argparse
import json
import zipfile
from pathlib import Path
from typing import Any
from urllib.parse import quote

from packaging.utils import parse_wheel_filename

from tools.common.files import digest_of
from tools.common.git import Git
from tools.common.pin import BaseWheel, Pin, Project
from tools.series.series import Series, fingerprint
from tools.wheel.plan import list_inputs, read_wheel_version, tree_series

# The pinned base wheel with the series laid over it: tools/wheel/plan.py.
BUILD_TYPE = "urn:vllm-routed-experts:overlay:v1"
# The bytes are the same wherever they are made, so no one machine is named.
BUILDER = "urn:vllm-routed-experts:builder:any"


def declare(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("wheels", nargs="+", type=Path, metavar="WHEEL")


def run(arguments: argparse.Namespace, project: Project) -> None:
    """Write beside each wheel its bill of materials, as it is inside, and its provenance (in-toto,
    SLSA). Whoever publishes the provenance signs it."""
    commit = Git(project.root).text("rev-parse", "HEAD")
    _, series = tree_series(project)
    for wheel in arguments.wheels:
        _, version, _, tags = parse_wheel_filename(wheel.name)
        base, release = read_wheel_version(project.pin, str(version), tags)
        with zipfile.ZipFile(wheel) as members:
            (sbom,) = (name for name in members.namelist() if name.endswith(".cdx.json"))
            wheel.with_name(f"{wheel.name}.cdx.json").write_bytes(members.read(sbom))
        provenance = make_provenance(project.pin, base, series, str(release), commit, wheel)
        wheel.with_name(f"{wheel.name}.intoto.json").write_bytes(provenance)


def make_provenance(
    pin: Pin, base: BaseWheel, series: Series, release: str, commit: str, wheel: Path
) -> bytes:
    """The statement about one wheel: this repository's commit, then every input by digest."""
    ours = {"name": "vllm-routed-experts", "digest": {"gitCommit": commit}}
    inputs: list[dict[str, Any]] = [ours]
    for name, digest, facts, file in list_inputs(pin, base, series):
        inputs.append({"name": name, "digest": {"sha256": digest}, "annotations": facts})
        if file:
            package = f"pkg:pypi/{file.distribution}@{file.version}"
            inputs[-1]["uri"] = f"{package}?file_name={quote(file.filename, safe='')}"
    command = f"python -m tools wheel build --on {pin.line} --variant {base.variant}"
    parameters = {
        **{"command": command, "variant": base.variant, "release": release},
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
