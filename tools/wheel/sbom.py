# SPDX-License-Identifier: Apache-2.0
"""What a patched wheel was made of, as CycloneDX: the same bytes for the same ingredients."""

import hashlib
import uuid
from datetime import UTC, datetime

from cyclonedx.model import HashAlgorithm, HashType, Property
from cyclonedx.model.bom import Bom
from cyclonedx.model.component import Component, ComponentType
from cyclonedx.output import make_outputter
from cyclonedx.schema import OutputFormat, SchemaVersion

from tools.common.pin import BaseWheel, Pin, PinnedFile
from tools.series.series import Series, fingerprint

# The zip format's first date: the bytes must not depend on when the wheel is made.
_DATE = datetime(1980, 1, 1, tzinfo=UTC)
# A file that a wheel is made of: name, sha256, facts, and what it was downloaded as.
Input = tuple[str, str, dict[str, str], PinnedFile | None]


def list_inputs(pin: Pin, base: BaseWheel, series: Series) -> list[Input]:
    """Source archive, base wheel and every patch, in order."""
    source, wheel = pin.source, base.file
    below = {"role": "base wheel", "trusted_by": base.trusted_by}
    found: list[Input] = [
        (source.filename, source.sha256, {"role": "source archive", "commit": pin.commit}, source),
        (wheel.filename, wheel.sha256, below, wheel),
    ]
    for number, patch in enumerate(series, start=1):
        digest, name = hashlib.sha256(patch.data).hexdigest(), f"patches/{pin.line}/{patch.name}"
        found.append((name, digest, {"role": "patch", "position": str(number)}, None))
    return found


def make_sbom(pin: Pin, base: BaseWheel, series: Series, version: str) -> bytes:
    """The bill of materials: base wheel, source archive and every patch, by digest."""
    key = f"{fingerprint(series, pin)} {base.file.sha256} {version}"
    bom = Bom(serial_number=uuid.uuid5(uuid.NAMESPACE_URL, key))
    bom.metadata.timestamp = _DATE
    wheel = Component(name="vllm", version=version, type=ComponentType.LIBRARY, bom_ref="wheel")
    bom.metadata.component = wheel
    parts = [
        Component(
            name=name,
            type=ComponentType.FILE,
            bom_ref=name,
            hashes=[HashType(alg=HashAlgorithm.SHA_256, content=digest)],
            properties=[
                Property(name=f"vllm-routed-experts:{k}", value=v) for k, v in facts.items()
            ],
        )
        for name, digest, facts, _ in list_inputs(pin, base, series)
    ]
    bom.components.update(parts)
    bom.register_dependency(wheel, parts)
    text = make_outputter(bom, OutputFormat.JSON, SchemaVersion.V1_6).output_as_string(indent=2)
    return text.encode() + b"\n"
