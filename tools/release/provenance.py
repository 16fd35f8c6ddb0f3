# SPDX-License-Identifier: Apache-2.0
"""What a wheel was built from, as an in-toto statement with SLSA's provenance predicate.

The statement is not signed: whoever publishes a release signs it with a key of their own. It names
no machine and no time, so the same ingredients give the same bytes.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any
from urllib.parse import quote

from tools.common.pin import BaseWheel, Pin, PinnedFile
from tools.series.series import Series, fingerprint

STATEMENT = "https://in-toto.io/Statement/v1"
PREDICATE = "https://slsa.dev/provenance/v1"
# The pinned base wheel with the series laid over it: tools/wheel/plan.py.
BUILD_TYPE = "urn:vllm-routed-experts:overlay:v1"
# The bytes are the same wherever they are made, so no one machine is named.
BUILDER = "urn:vllm-routed-experts:builder:any"


def _package(pinned: PinnedFile, **annotations: str) -> dict[str, Any]:
    name = quote(pinned.filename, safe="")
    return {
        "name": pinned.filename,
        "uri": f"pkg:pypi/{pinned.distribution}@{pinned.version}?file_name={name}",
        "digest": {"sha256": pinned.sha256},
        "annotations": annotations,
    }


def make_provenance(
    pin: Pin,
    base: BaseWheel,
    series: Series,
    *,
    release: int,
    commit: str,
    filename: str,
    sha256: str,
) -> bytes:
    """The statement about one wheel: every input by digest, in the order it was used.

    ``commit`` is this repository's, ``filename`` and ``sha256`` are the wheel's.
    """
    inputs = [
        {"name": "vllm-routed-experts", "digest": {"gitCommit": commit}},
        _package(pin.source, role="source archive", tag=pin.git_tag, commit=pin.commit),
        _package(base.file, role="base wheel", trusted_by=base.trusted_by),
        *(
            {
                "name": f"patches/{pin.line}/{patch.name}",
                "digest": {"sha256": hashlib.sha256(patch.data).hexdigest()},
                "annotations": {"role": "patch", "position": str(number)},
            }
            for number, patch in enumerate(series, start=1)
        ),
    ]
    statement = {
        "_type": STATEMENT,
        "subject": [{"name": filename, "digest": {"sha256": sha256}}],
        "predicateType": PREDICATE,
        "predicate": {
            "buildDefinition": {
                "buildType": BUILD_TYPE,
                "externalParameters": {
                    "command": "python -m tools wheel build "
                    f"--on {pin.line} --variant {base.variant}",
                    "variant": base.variant,
                    "release": str(release),
                    "seriesFingerprint": fingerprint(series, pin),
                },
                "resolvedDependencies": inputs,
            },
            "runDetails": {"builder": {"id": BUILDER}},
        },
    }
    return json.dumps(statement, indent=2, ensure_ascii=False).encode() + b"\n"
