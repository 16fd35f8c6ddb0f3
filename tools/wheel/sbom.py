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

from tools.common.pin import BaseWheel, Pin
from tools.series.series import Series, fingerprint

# The zip format's first date: the bytes must not depend on when the wheel is made.
_DATE = datetime(1980, 1, 1, tzinfo=UTC)


def _file(name: str, sha256: str, role: str, **properties: str) -> Component:
    facts = {"role": role, **properties}.items()
    return Component(
        name=name,
        type=ComponentType.FILE,
        bom_ref=name,
        hashes=[HashType(alg=HashAlgorithm.SHA_256, content=sha256)],
        properties=[Property(name=f"vllm-routed-experts:{key}", value=text) for key, text in facts],
    )


def make_sbom(pin: Pin, base: BaseWheel, series: Series, version: str) -> bytes:
    """The bill of materials: base wheel, source archive and every patch, by digest."""
    key = f"{fingerprint(series, pin)} {base.file.sha256} {version}"
    bom = Bom(serial_number=uuid.uuid5(uuid.NAMESPACE_URL, key))
    bom.metadata.timestamp = _DATE
    wheel = Component(name="vllm", version=version, type=ComponentType.LIBRARY, bom_ref="wheel")
    parts = [
        _file(base.file.filename, base.file.sha256, "base wheel", trusted_by=base.trusted_by),
        _file(pin.source.filename, pin.source.sha256, "source archive", commit=pin.commit),
    ]
    for number, patch in enumerate(series, start=1):
        digest, name = hashlib.sha256(patch.data).hexdigest(), f"patches/{pin.line}/{patch.name}"
        parts.append(_file(name, digest, "patch", position=str(number)))
    bom.metadata.component = wheel
    for part in parts:
        bom.components.add(part)
    bom.register_dependency(wheel, parts)
    text = make_outputter(bom, OutputFormat.JSON, SchemaVersion.V1_6).output_as_string(indent=2)
    return text.encode() + b"\n"
